"""What a long queue costs: 20,000 instances wait for GPUs that ten simulated nodes do not have.

    python -m benchmarks.backlog [--pending 20000] [--database postgresql]

Prints, first without and then with the queue: how soon a new instance runs that fits at once, how soon a
freed GPU has its next instance, how long a page of the queue takes, and the CPU of the idle server.
"""

import argparse
import sys
import time
from datetime import datetime
from typing import Any

from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.product import ServerProcess

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

GPUS = 80
SAMPLES = 20
SETTLE_S = 15.0
WAITING: dict[str, object] = {
    "image": "busybox:1", "command": ["sleep", "100000"], "gpus": {"count": 1}, "cpus": 1, "memory_mib": 1024,
}  # fmt: skip


def main(pending: int, database: str) -> int:
    with (
        stack.server_on(database) as server,
        stack.simulated_fleet(server, "10x8xH100"),
        server.client as admin,
    ):
        for _ in range(GPUS):
            admin.create(**WAITING)
        wait_until(lambda: _running(admin) == GPUS, 60)
        alone = _starts(admin)
        filled = _fill(server, pending)
        time.sleep(SETTLE_S)
        print(f"{database}: {filled} pending; medians of {SAMPLES} (longest)")
        behind, freed = _starts(admin), _successions(admin)
        pages, changed = _pages(admin, changing=False), _pages(admin, changing=True)
        time.sleep(SETTLE_S)
        idle = stack.cpu_share(server.pid, 20)
    print(f"an instance that fits at once runs after {_of(alone)} without the queue")
    passed = [
        verdict(f"... and with it after {_of(behind)}, longest", max(behind), 0.5, " s"),
        verdict(f"a freed GPU has its next instance after {_of(freed)}, longest", max(freed), 0.5, " s"),
        verdict(f"GET /v1/queue {_of(pages)}, p99", 1e3 * percentile(pages, 0.99), 100, " ms"),
        verdict(f"... just after a create {_of(changed)}, p99", 1e3 * percentile(changed, 0.99), 100, " ms"),
    ]
    print(f"the idle server uses {idle:.1f} % of a core")
    return 0 if all(passed) else 1


def _of(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ms ({1e3 * max(seconds):.0f} ms)"


def _running(admin: Client) -> int:
    return len(admin.items("/v1/instances", state="running", limit=200))


def _starts(admin: Client) -> list[float]:
    """From the request to `running`, for instances without GPUs; each is deleted again."""
    taken = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        made = admin.create(cpus=0.1, memory_mib=16)["id"]
        answer = admin.get(f"/v1/instances/{made}/wait", params={"state": "running", "timeout_s": 60})
        taken.append(time.perf_counter() - began)
        assert answer.json()["instance"]["state"] == "running", answer.text
        assert admin.delete(f"/v1/instances/{made}").status_code < 300
    return taken


def _successions(admin: Client) -> list[float]:
    """From the end of an instance to the placement of the next, by the times of their events."""
    taken = []
    for _ in range(SAMPLES):
        ended = admin.items("/v1/instances", state="running", limit=1)[0]["id"]
        after = _newest(admin)
        assert admin.delete(f"/v1/instances/{ended}").status_code < 300
        seen: dict[str, datetime] = {}
        while not seen.keys() >= {"freed", "placed"}:
            events = admin.get("/v1/events", params={"after": after, "wait_s": 10}).json()
            for event in events["items"]:
                after, data = event["seq"], event["data"]
                at = datetime.fromisoformat(event["at"])
                if data.get("instance_id") == ended and data["to"] in {"stopped", "deleted"}:
                    seen.setdefault("freed", at)
                elif "freed" in seen and data.get("to") == "scheduled":
                    seen.setdefault("placed", at)
        taken.append((seen["placed"] - seen["freed"]).total_seconds())
    return taken


def _newest(admin: Client) -> int:
    """The `seq` of an event that was just appended."""
    made = admin.create(cpus=0.1, memory_mib=16, node_selector={"zone": "none"})["id"]
    return int(admin.items(f"/v1/instances/{made}/events")[-1]["seq"])


def _pages(admin: Client, *, changing: bool) -> list[float]:
    """The times of 100 pages; `changing`: an instance is created before each."""
    taken: list[float] = []
    cursor: str | None = None
    while len(taken) < 100:
        if changing:
            admin.create(cpus=0.1, memory_mib=16, node_selector={"zone": "none"})
        began = time.perf_counter()
        page: dict[str, Any] = admin.get(
            "/v1/queue", params={"limit": 50} | ({"cursor": cursor} if cursor else {})
        ).json()
        taken.append(time.perf_counter() - began)
        cursor = page["next_cursor"]
    return taken


def _fill(server: ServerProcess, pending: int) -> int:
    made = 0
    while made < pending:
        made += len(load.closed_loop(server.url, "POST", "/v1/instances", WAITING, 10).latencies_s)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=20_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given = parser.parse_args()
    sys.exit(main(given.pending, given.database))
