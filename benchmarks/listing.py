"""Lists of 100 of 1,000 instances per second, with 16 clients.

    python -m benchmarks.listing [seconds] [--different]

With `--different`, each client lists a page of another size, from 100 to 115. Only equal pages have a bound.
"""

import argparse
import sys

from tests.service import Client

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

INSTANCES = 1000


def main(seconds: float, *, different: bool) -> int:
    path = "/v1/instances?limit=1{client:02}" if different else "/v1/instances?limit=100"

    with stack.server_alone() as server, stack.simulated_fleet(server, "10x16xH100"):
        with server.client as admin:
            fill(admin, INSTANCES)
        made = load.closed_loop(server.url, "GET", path, None, seconds)
    latencies = made.latencies_s
    low, high = median(latencies) * 1e3, percentile(latencies, 0.99) * 1e3
    print(f"{len(latencies)} lists of 100 of {INSTANCES} in {made.seconds:.1f} s at {load.CLIENTS} clients")
    print(f"median {low:.1f} ms, p99 {high:.1f} ms")
    if different:
        print(f"{made.rate:.0f} answers a second")
        return 0
    return 0 if verdict("answers a second", made.rate, 400, "/s", at_least=True) else 1


def fill(admin: Client, count: int) -> None:
    """Create instances that run with GPUs, run without GPUs, or stay pending."""
    for number in range(count):
        gpus = {"count": 17} if number % 10 == 0 else {"count": int(number % 6 == 0)}
        admin.create(name=f"listed-{number}", gpus=gpus, cpus=0.1, memory_mib=64, labels={"team": "vision"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="?", type=float, default=10)
    parser.add_argument("--different", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.seconds, different=given.different))
