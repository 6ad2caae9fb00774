"""Creates per second with simulated nodes and 16 clients, on SQLite or on PostgreSQL with replicas.

    python -m benchmarks.creates [seconds] [--database postgresql] [--replicas N] [--what users]

The 80 GPUs are soon allocated and the queue grows, so the control plane also schedules, syncs with ten nodes
and explains thousands of pending instances. Users are rows with an entry in the audit log and no event. Only
instances on SQLite have bounds.
"""

import argparse
import sys
from collections.abc import Sequence

from tests.walk.product import ServerProcess

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

INSTANCE: dict[str, object] = {"image": "busybox:1", "command": ["sleep", "100000"], "gpus": {"count": 1}}
WHAT: dict[str, dict[str, object]] = {"instances": INSTANCE, "users": {"name": "Ada"}}


def main(seconds: float, database: str, replicas: int, what: str) -> int:
    with stack.servers_on(database, replicas) as servers, stack.simulated_fleet(servers[0], "10x8xH100"):
        urls = [server.url for server in servers]
        before = _cpu_seconds(servers)
        made = load.closed_loop(urls[0], "POST", f"/v1/{what}", WHAT[what], seconds, *urls[1:])
        cpu = _cpu_seconds(servers) - before
        with servers[0].client as admin:
            running = len(admin.items("/v1/instances", state="running", limit=200))
    latencies = made.latencies_s
    print(
        f"{len(latencies)} {what} in {made.seconds:.1f} s at {load.CLIENTS} clients, {database}, {replicas} "
        f"replicas: {made.rate:.1f}/s, median {median(latencies) * 1e3:.1f} ms, "
        f"p99 {percentile(latencies, 0.99) * 1e3:.1f} ms, "
        f"{cpu / len(latencies) * 1e3:.2f} ms of the servers' CPU each; {running} run on 80 GPUs"
    )
    if database != "sqlite" or what != "instances":
        return 0
    passed = [
        verdict("creates a second", made.rate, 500, "/s", at_least=True),
        verdict("p99", percentile(latencies, 0.99) * 1e3, 100, " ms"),
        verdict("GPUs in use at the end", running, 80, at_least=True),
    ]
    return 0 if all(passed) else 1


def _cpu_seconds(servers: Sequence[ServerProcess]) -> float:
    return sum(stack.cpu_seconds(server.pid) for server in servers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="?", type=float, default=20)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--what", choices=tuple(WHAT), default="instances")
    given = parser.parse_args()
    sys.exit(main(given.seconds, given.database, given.replicas, given.what))
