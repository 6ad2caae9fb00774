"""CPU of an idle control plane, in percent of a core.

    python -m benchmarks.idle [seconds]

Measures 1,000 pending instances on 10 nodes, then 100 nodes that report every 5 s. Another process simulates
the nodes.
"""

import sys
import time

from tests.service import Client
from tests.testbed.waiting import wait_until

from benchmarks import stack
from benchmarks.figures import verdict


def main(seconds: float) -> int:
    passed = [
        verdict("1,000 pending and 10 nodes", _share("10x8xH100", 1000, seconds), 5, " % of a core"),
        verdict("100 nodes reporting every 5 s", _share("100x8xH100", 0, seconds), 20, " % of a core"),
    ]
    return 0 if all(passed) else 1


def _share(fleet: str, pending: int, seconds: float) -> float:
    with stack.server_alone() as server, stack.simulated_fleet(server, fleet):
        with server.client as admin:
            for _ in range(pending):
                admin.create(gpus={"count": 9})
            wait_until(lambda: _all_explained(admin), 60)
        time.sleep(5)  # until the effects of filling are over
        return stack.cpu_share(server.pid, seconds)


def _all_explained(admin: Client) -> bool:
    return all(item["reason"]["code"] != "queued" for item in admin.items("/v1/instances", limit=200))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 30))
