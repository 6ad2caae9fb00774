"""Deletes per second with simulated nodes and 16 clients, on SQLite or on PostgreSQL with replicas.

    python -m benchmarks.deletes [count] [--database postgresql] [--replicas N] [--state running]

Creates the instances, waits until they are pending for good or until they run, deletes each with one request,
and waits until none is left. Running instances have no GPU, so that ten nodes can run all of them.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.service import Client
from tests.testbed.waiting import wait_until

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

COMMON: dict[str, object] = {"image": "busybox:1", "command": ["sleep", "100000"]}
WHAT: dict[str, dict[str, object]] = {
    "pending": {**COMMON, "gpus": {"count": 8}, "node_selector": {"no": "where"}},
    "running": {**COMMON, "cpus": 0.1, "memory_mib": 16},
}


def main(count: int, database: str, replicas: int, state: str) -> int:
    with (
        stack.servers(database, replicas) as servers,
        stack.simulated_fleet(servers[0], "10x8xH100", elsewhere=True),
    ):
        urls = [server.url for server in servers]
        with servers[0].client as admin:
            ids = _fill(admin, urls, count, state)
            before, began = stack.cpu_seconds_of(servers), time.perf_counter()
            deleted = load.each(urls, "DELETE", [f"/v1/instances/{each}" for each in ids])
            cpu = stack.cpu_seconds_of(servers) - before
            wait_until(lambda: not admin.items("/v1/instances", limit=1), 120)
            gone_s = time.perf_counter() - began
    latencies = deleted.latencies_s
    print(
        f"{len(latencies)} {state} instances deleted in {deleted.seconds:.1f} s at {load.CLIENTS} clients, "
        f"{database}, {replicas} replicas: {deleted.rate:.1f}/s, median {median(latencies) * 1e3:.1f} ms, "
        f"p99 {percentile(latencies, 0.99) * 1e3:.1f} ms, longest {max(latencies) * 1e3:.1f} ms, "
        f"{cpu / len(latencies) * 1e3:.2f} ms of the servers' CPU each; the last is gone after {gone_s:.1f} s"
    )
    if replicas > 1:
        return 0
    return 0 if verdict("deletes a second", deleted.rate, 300, "/s", at_least=True) else 1


def _fill(admin: Client, urls: Sequence[str], count: int, state: str) -> list[str]:
    """Create instances and wait until the scheduler has considered or the nodes have started all of them."""
    load.each(urls, "POST", ["/v1/instances"] * count, WHAT[state])
    wait_until(lambda: all(_is_settled(item, state) for item in _all(admin)), 300)
    return [str(item["id"]) for item in _all(admin)]


def _all(admin: Client) -> Iterator[dict[str, Any]]:
    params: dict[str, Any] = {"limit": 200}
    while True:
        page = admin.get("/v1/instances", params=params).json()
        yield from page["items"]
        if page["next_cursor"] is None:
            return
        params["cursor"] = page["next_cursor"]


def _is_settled(item: Mapping[str, Any], state: str) -> bool:
    return bool(item["state"] == state and (item["reason"] or {}).get("code") != "queued")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=5000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--state", choices=tuple(WHAT), default="pending")
    given = parser.parse_args()
    sys.exit(main(given.count, given.database, given.replicas, given.state))
