"""CPU of an idle control plane, in percent of a core.

    python -m benchmarks.idle [seconds] [--database postgresql]

Measures 1,000 pending instances on 10 nodes, then 100 nodes that report every 5 s. Another process simulates
the nodes.
"""

import argparse
import sys
import time

from tests.service import Client
from tests.testbed.waiting import wait_until

from benchmarks import stack
from benchmarks.figures import verdict


def main(seconds: float, database: str) -> int:
    waiting = _share(database, "10x8xH100", 1000, seconds)
    nodes = _share(database, "100x8xH100", 0, seconds)
    passed = [
        verdict("1,000 pending and 10 nodes", waiting, 2, " % of a core"),
        verdict("100 nodes reporting every 5 s", nodes, 20, " % of a core"),
    ]
    return 0 if all(passed) else 1


def _share(database: str, fleet: str, pending: int, seconds: float) -> float:
    with stack.server_on(database) as server, stack.simulated_fleet(server, fleet):
        with server.client as admin:
            for _ in range(pending):
                admin.create(gpus={"count": 9})
            wait_until(lambda: _all_explained(admin), 60)
        time.sleep(5)  # until the effects of filling are over
        return stack.cpu_share(server.pid, seconds)


def _all_explained(admin: Client) -> bool:
    return all(item["reason"]["code"] != "queued" for item in admin.items("/v1/instances", limit=200))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="?", type=float, default=30)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given = parser.parse_args()
    sys.exit(main(given.seconds, given.database))
