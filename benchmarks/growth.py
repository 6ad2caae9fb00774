"""Database growth after minutes of creates and deletes by one key with a quota of one instance.

    python -m benchmarks.growth [--minutes 10] [--rate-limits on|off]

Runs a server on SQLite with one simulated node. Each cycle creates an instance of 224 KiB with an
Idempotency-Key, waits until it runs, and deletes it. Retention is set to the minimum. Sizes include
mooring.db and its log after a checkpoint.
"""

import argparse
import sqlite3
import sys
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from random import Random

import httpx
from tests.service import Client

from benchmarks import stack
from benchmarks.figures import verdict

MIB = 1024 * 1024
MAX_GROWTH_MIB = 5
SHORTEST = {"MOORING_DELETED_KEPT_DAYS": "0.0001", "MOORING_IDEMPOTENCY_KEPT_HOURS": "0.001"}
ENV = {f"V{number}": b64encode(Random(number).randbytes(24_576)).decode() for number in range(7)}
BODY = {"image": "busybox:1", "command": ["sleep", "100000"], "gpus": {"count": 1}, "env": ENV}


def main(minutes: float, rate_limits: str) -> int:
    with (
        stack.server_alone(MOORING_RATE_LIMITS=rate_limits, **SHORTEST) as server,
        stack.simulated_fleet(server, "1x8xH100"),
        server.client as admin,
        _tenant(admin) as member,
    ):
        path = Path(server.database_url.removeprefix("sqlite:///"))
        before = _size(path)
        cycles = _abuse(member, minutes * 60)
        during = _size(path)
        _wait_for_retention(path)
        after, rows = _size(path), _rows(path)
    print(f"{cycles} instances created and deleted in {minutes:g} min, {cycles * 225 / 1024:.0f} MiB of "
          f"specs written\n{before / MIB:.2f} MiB before, {during / MIB:.2f} MiB at the end, "
          f"{after / MIB:.2f} MiB after retention\nrows after it: {rows}")  # fmt: skip
    grown = (after - before) / MIB
    passed = [
        verdict("grown", grown, MAX_GROWTH_MIB, " MiB"),
        verdict("instances left", rows["instances"], 0),
    ]
    return 0 if all(passed) else 1


def _tenant(admin: Client) -> Client:
    project = _made(admin.post("/v1/projects", json={"name": "small"}))["id"]
    limited = admin.patch(f"/v1/projects/{project}", json={"quotas": {"instances": 1}})
    assert limited.status_code == 200, limited.text
    key = {"name": "small", "project_id": project, "role": "member"}
    return Client(str(admin.base_url), str(_made(admin.post("/v1/api-keys", json=key))["key"]))


def _made(answer: httpx.Response) -> dict[str, object]:
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def _abuse(member: Client, seconds: float) -> int:
    """Create and delete as fast as the rate limit allows. Returns the number of instances."""
    cycles, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        made = _send(member, "POST", "/v1/instances", {"Idempotency-Key": f"cycle-{cycles}"})
        instance_id = made.json()["id"]
        member.wait(instance_id, "running")
        _send(member, "DELETE", f"/v1/instances/{instance_id}", {})
        while member.get(f"/v1/instances/{instance_id}").status_code != httpx.codes.NOT_FOUND:
            time.sleep(0.1)
        cycles += 1
    return cycles


def _send(member: Client, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
    """Retry until the rate limit allows the request."""
    while True:
        body = BODY if method == "POST" else None
        answer = member.request(method, path, json=body, headers=headers)
        if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
            assert answer.is_success, answer.text
            return answer
        time.sleep(float(answer.headers["retry-after"]))


def _size(path: Path) -> int:
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    log = path.with_name(path.name + "-wal")
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def _wait_for_retention(path: Path) -> None:
    """Wait up to a minute until retention has purged the instances and released the pages."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        time.sleep(3)
        with closing(sqlite3.connect(path, timeout=10)) as connection:
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        if _rows(path)["instances"] == 0 and free <= 256:
            return


def _rows(path: Path) -> dict[str, int]:
    tables = ("instances", "instance_records", "allocations", "idempotency_keys", "events", "audit_log")
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        return {
            table: int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in tables
        }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--minutes", type=float, default=10)
    arguments.add_argument("--rate-limits", choices=("on", "off"), default="on")
    given = arguments.parse_args()
    sys.exit(main(given.minutes, given.rate_limits))
