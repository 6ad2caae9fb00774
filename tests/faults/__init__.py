"""Live trials: real processes under continuous load, faults in random order, and the invariants after each.

    balancer       forwards connections to a live replica, over a link that can fail
    fleet          replicas on one PostgreSQL, nodes with dockerd and agents
    clients        users whose requests and acknowledgements are recorded
    observation    containers that must not be touched, and invariants that hold at any time
    history        the event log during a trial
    trial          runs one fault, waits until the fleet has settled, and checks
    catalog        all faults; the other modules have those of one subject each

docs/faults.md describes what is tried, and `make faults` runs it.
"""
