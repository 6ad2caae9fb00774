"""The invariants of the product, as checks of evidence: the simulation, the crash tests and the live trials
share them.

Each check yields a sentence for each violation, and begins it with the number of the invariant:

    I1   no GPU or MIG device has two users, in the database and in the containers    containers, ledger
    I2   an acknowledged create exists until it is deleted                            acknowledged
    I3   one request to create, one instance                                          acknowledged
    I4   one attempt has one container, and an instance one running container         containers
    I5   a GPU is released only when its container is gone                            containers
    I6   only allowed transitions; versions increase                                  events
    I7   an agent's generation never goes back                                        tests/simulation
    I8   the ledger's intervals are disjoint on each GPU, and equal in an attempt     ledger
    I9   nothing runs on a GPU outside the ledger's intervals                         containers
    I10  a project's active instances are within its quota                            ledger
    I11  what is deleted does not return                                              events, settled
    I12  after the last fault, the desired state is reached                           settled
    I13  one event for each change of state, one audit row for each operation         events, acknowledged

`settled` holds only when no operation is in progress; the others hold at any time.
"""
