"""What nodes cost a server that report every 5 seconds, and how long users wait meanwhile.

    python -m benchmarks.nodes [nodes …] [--database postgresql] [--replicas N]

The nodes run in another process, which speaks the agents' protocol (wire_nodes.py). Prints the server's CPU
while every node sends heartbeats, the latencies of a client that creates, reads and deletes instances
meanwhile, and, with few nodes, the server's CPU while every node sends whole reports instead.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.nodes import join_token
from tests.service import Client
from tests.walk.product import ServerProcess

from benchmarks import stack
from benchmarks.figures import percentile, verdict
from benchmarks.wire_nodes import WireNodes, wire_nodes

SETTLE_S = 20.0
MEASURE_S = 40.0
CREATE_EVERY_S = 0.2
READS_FOR_EACH = 4
HEARTBEAT, REPORT = "/agent/v1/heartbeat", "/agent/v1/sync"
NODES_ON_A_CORE = 3000
CPU_FOR_EACH_MS = 1.0  # with so many nodes; with few, the loops and the batches are most of it
REPORTS_UP_TO = 300  # nodes: their reports alone take half a core


@dataclass(frozen=True)
class Cost:
    """The servers' CPU over some time, as a share of a core, and for each of these calls."""

    calls: float
    share: float
    failed: int

    @property
    def each_ms(self) -> float:
        return self.share / self.calls * 1000 if self.calls else float("inf")


def main(sizes: Sequence[int], database: str, replicas: int) -> int:
    passed = [_passed(size, measured(size, database, replicas)) for size in sizes]
    return 0 if all(passed) else 1


def measured(size: int, database: str, replicas: int, *, only_heartbeats: bool = False) -> Cost:
    """Print what so many nodes cost, and return the cost of their heartbeats."""
    with stack.servers(database, replicas) as servers, servers[0].client as admin:
        idle = _share(servers, 10)
        tokens = [join_token(admin) for _ in range(size)]
        began, cpu_before = time.monotonic(), _cpu(servers)
        with wire_nodes([server.url for server in servers], tokens, within_s=1800) as nodes:
            joined_s, joined_cpu = time.monotonic() - began, _cpu(servers) - cpu_before
            print(
                f"{size} nodes, {database}, {replicas} servers: joined in {joined_s:.0f} s, "
                f"{joined_cpu / size * 1000:.1f} ms of CPU each; idle before: {idle:.1%} of a core",
                flush=True,
            )
            time.sleep(SETTLE_S)
            heartbeats = _cost(nodes, servers, HEARTBEAT)
            _print_cost("heartbeats", size, heartbeats)
            if only_heartbeats:
                return heartbeats
            _print_latencies(admin)
            if size <= REPORTS_UP_TO:
                nodes.heartbeats(on=False)
                time.sleep(SETTLE_S)
                _print_cost("whole reports", size, _cost(nodes, servers, REPORT))
    return heartbeats


def _passed(size: int, heartbeats: Cost) -> bool:
    served = verdict(
        "nodes that one core serves", size / heartbeats.share, NODES_ON_A_CORE, "", at_least=True
    )
    if size < NODES_ON_A_CORE:
        return served
    return verdict("CPU of a heartbeat", heartbeats.each_ms, CPU_FOR_EACH_MS, " ms") and served


def _cost(nodes: WireNodes, servers: Sequence[ServerProcess], path: str) -> Cost:
    before, cpu_before, began = nodes.counts(), _cpu(servers), time.monotonic()
    time.sleep(MEASURE_S)
    made, cpu = nodes.counts() - before, _cpu(servers) - cpu_before
    seconds = time.monotonic() - began
    return Cost(made[path] / seconds, cpu / seconds, made["failed"])


def _print_cost(what: str, size: int, cost: Cost) -> None:
    print(
        f"     {what}: {cost.calls:.0f}/s, {cost.share:.1%} of a core, {cost.each_ms:.2f} ms each (all other "
        f"work of the servers included), {cost.failed} failed; one core serves {size / cost.share:.0f} nodes",
        flush=True,
    )


def _print_latencies(admin: Client) -> None:
    creates, reads, running = [], [], 0
    until = time.monotonic() + MEASURE_S
    while (began := time.monotonic()) < until:
        made = admin.create(gpus={"count": 1})
        creates.append(time.monotonic() - began)
        for _ in range(READS_FOR_EACH):
            read_at = time.monotonic()
            shown = admin.get(f"/v1/instances/{made['id']}").json()
            reads.append(time.monotonic() - read_at)
        running += shown["state"] == "running"
        assert admin.delete(f"/v1/instances/{made['id']}").status_code in {202, 204}
        time.sleep(max(0.0, began + CREATE_EVERY_S - time.monotonic()))
    print(
        f"     meanwhile: {len(creates)} creates, p50 {percentile(creates, 0.5) * 1e3:.1f} ms, p99 "
        f"{percentile(creates, 0.99) * 1e3:.1f} ms; {len(reads)} GETs, "
        f"p50 {percentile(reads, 0.5) * 1e3:.1f} ms, p99 {percentile(reads, 0.99) * 1e3:.1f} ms",
        flush=True,
    )


def _share(servers: Sequence[ServerProcess], seconds: float) -> float:
    before, began = _cpu(servers), time.monotonic()
    time.sleep(seconds)
    return (_cpu(servers) - before) / (time.monotonic() - began)


def _cpu(servers: Sequence[ServerProcess]) -> float:
    return sum(stack.cpu_seconds(server.pid) for server in servers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", nargs="*", type=int, default=[300, 1000, 3000])
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    sys.exit(main(given.nodes, given.database, given.replicas))
