"""A deterministic simulation of the whole product: replicas of the control plane, agents, users, and faults.

The product's own code runs on a real database: loops, operations and their transactions, and agents with all
their threads. It has one virtual clock and one source of random numbers (`virtual.py`). Left out are HTTP
parsing, Docker and NVML, which the tests of tests/api, tests/agent and tests/walk use for real.

    python -m tests.simulation                    1,000 runs
    python -m tests.simulation --seeds 17         one run; --trace prints what happened
"""
