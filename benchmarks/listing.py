"""Lists of 100 of 1,000 instances per second, with 16 clients.

python -m benchmarks.listing [seconds]
"""

import sys

from tests.service import Client

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

INSTANCES = 1000


def main(seconds: float) -> int:
    with stack.server_alone() as server, stack.simulated_fleet(server, "10x16xH100"):
        with server.client as admin:
            fill(admin, INSTANCES)
        made = load.closed_loop(server.url, "GET", "/v1/instances?limit=100", None, seconds)
    latencies = made.latencies_s
    low, high = median(latencies) * 1e3, percentile(latencies, 0.99) * 1e3
    print(f"{len(latencies)} lists of 100 of {INSTANCES} in {made.seconds:.1f} s at {load.CLIENTS} clients")
    print(f"median {low:.1f} ms, p99 {high:.1f} ms")
    return 0 if verdict("answers a second", made.rate, 150, "/s", at_least=True) else 1


def fill(admin: Client, count: int) -> None:
    """Create instances that run with GPUs, run without GPUs, or stay pending."""
    for number in range(count):
        gpus = {"count": 17} if number % 10 == 0 else {"count": int(number % 6 == 0)}
        admin.create(name=f"listed-{number}", gpus=gpus, cpus=0.1, memory_mib=64, labels={"team": "vision"})


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10))
