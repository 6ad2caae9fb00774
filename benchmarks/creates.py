"""Creates per second with simulated nodes, on SQLite or on PostgreSQL with replicas.

    python -m benchmarks.creates [seconds] [--database postgresql] [--replicas N] [--clients N]
        [--what users]

The 80 GPUs are soon allocated and the queue grows, so the control plane also schedules, syncs with ten nodes
and explains thousands of pending instances. Users are rows with an entry in the audit log and no event. Only
instances have bounds, with 16 clients on SQLite and 24 on PostgreSQL. Also prints the CPU of all processes
for each create, and for PostgreSQL what its backends wait for.
"""

import argparse
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.postgresql_load import PostgresLoad, observed

INSTANCE: dict[str, object] = {"image": "busybox:1", "command": ["sleep", "100000"], "gpus": {"count": 1}}
WHAT: dict[str, dict[str, object]] = {"instances": INSTANCE, "users": {"name": "Ada"}}


@dataclass(frozen=True)
class Result:
    """Creates a second, their 99th percentile in seconds, and the instances that run at the end."""

    rate: float
    p99_s: float
    running: int


def main(seconds: float, database: str, replicas: int, clients: int, what: str) -> int:
    result = measured(seconds, database, replicas, clients, what)
    if what != "instances":
        return 0
    bound = 500 if database == "sqlite" else 400
    passed = [verdict("creates a second", result.rate, bound, "/s", at_least=True)]
    if database == "sqlite":
        passed.append(verdict("p99", result.p99_s * 1e3, 100, " ms"))
    passed.append(verdict("GPUs in use at the end", result.running, 80, at_least=True))
    return 0 if all(passed) else 1


def measured(seconds: float, database: str, replicas: int, clients: int, what: str = "instances") -> Result:
    """Create with so many clients on a new service, and print what it took."""
    with ExitStack() as exits:
        servers = exits.enter_context(stack.servers(database, replicas))
        fleet = exits.enter_context(stack.simulated_fleet(servers[0], "10x8xH100"))
        urls = [server.url for server in servers]
        is_sqlite = database == "sqlite"
        with nullcontext(PostgresLoad()) if is_sqlite else observed(servers[0].database_url) as postgresql:
            before = stack.cpu_seconds_of(servers), stack.cpu_seconds(fleet)
            made = load.closed_loop(
                urls[0], "POST", f"/v1/{what}", WHAT[what], seconds, *urls[1:], clients=clients
            )
            cpu, nodes_cpu = stack.cpu_seconds_of(servers) - before[0], stack.cpu_seconds(fleet) - before[1]
        with servers[0].client as admin:
            running = len(admin.items("/v1/instances", state="running", limit=200))
    latencies = made.latencies_s
    print(
        f"{len(latencies)} {what} in {made.seconds:.1f} s at {clients} clients, {database}, {replicas} "
        f"replicas: {made.rate:.1f}/s, median {median(latencies) * 1e3:.1f} ms, "
        f"p99 {percentile(latencies, 0.99) * 1e3:.1f} ms; {running} run on 80 GPUs"
    )
    each = {"servers": cpu, "PostgreSQL": postgresql.cpu_s, "clients": made.cpu_s, "nodes": nodes_cpu}
    print(
        "CPU for each: "
        + ", ".join(f"{name} {1e3 * used / len(latencies):.2f} ms" for name, used in each.items())
    )
    print(f"cores in use: {sum(each.values()) / made.seconds:.2f} of {os.cpu_count()}", flush=True)
    if not is_sqlite:
        print(postgresql)
    return Result(made.rate, percentile(latencies, 0.99), running)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="?", type=float, default=20)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--what", choices=tuple(WHAT), default="instances")
    parser.add_argument("--clients", type=int)
    given = parser.parse_args()
    clients = given.clients or (16 if given.database == "sqlite" else 24)
    sys.exit(main(given.seconds, given.database, given.replicas, clients, given.what))
