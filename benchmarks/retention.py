"""Latency of writes while retention purges many old events from an SQLite database.

    python -m benchmarks.retention [events]

Inserts events that are 60 days old while the server is stopped, starts it, and creates and deletes an
instance in turn, every 20 ms a request. It stops when all old events are gone and their pages are back with
the file system, and then measures as many seconds again without retention, at most ten.
"""

import argparse
import http.client
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

from tests.walk.product import ServerProcess

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.load import HEADERS
from mooring.db.space import KEPT_PAGES

MIB = 1024 * 1024
EVERY_S = 0.02
MAX_WRITE_MS = 250
AGE = timedelta(days=60)
BODY = {"image": "busybox:1", "command": ["sleep", "9"], "cpus": 0.1, "memory_mib": 16}


def main(count: int) -> int:
    with stack.server_alone() as server:
        path = Path(server.database_url.removeprefix("sqlite:///"))
        server.stop()
        _insert(path, count)
        before = path.stat().st_size
        server.start()
        began = time.perf_counter()
        with closing(sqlite3.connect(path, timeout=10)) as connection, Log(path) as log:
            during = write(server, lambda: _is_purged(connection, count))
        purged_s = time.perf_counter() - began
        ends = time.perf_counter() + min(10, purged_s)
        quiet = write(server, lambda: time.perf_counter() > ends)
        after = path.stat().st_size
    print(f"{count} old events purged in {purged_s:.1f} s; the file had {before / MIB:.0f} MiB and has "
          f"{after / MIB:.0f} MiB, its log at most {log.largest / MIB:.1f} MiB")  # fmt: skip
    _report("writes while retention runs", during)
    _report("writes after that", quiet)
    return 0 if verdict("slowest write", max(during) * 1e3, MAX_WRITE_MS, " ms") else 1


def _insert(path: Path, count: int) -> None:
    """Insert events of one hour, as an installation with 50 creates a second writes them."""
    first = datetime.now(UTC).replace(tzinfo=None) - AGE
    data = json.dumps({"instance_id": "ins_01k0000000000000000000000", "from": "scheduled", "to": "running",
                       "version": 3, "reason": None})  # fmt: skip

    def rows() -> Iterator[tuple[str, str, str, str, str, str]]:
        for number in range(count):
            at = (first + timedelta(hours=1) * number / count).isoformat(" ", "microseconds")
            instance_id = f"ins_01k{number // 5:022d}"
            yield f"evt_01k{number:022d}", "instance.state_changed", "prj_old", instance_id, at, data

    with closing(sqlite3.connect(path)) as connection, connection:
        columns = "id, type, project_id, instance_id, at, data"
        connection.executemany(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows())


def _is_purged(connection: sqlite3.Connection, count: int) -> bool:
    (first,) = connection.execute("SELECT min(seq) FROM events").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return bool(first > count and free <= 2 * KEPT_PAGES)


def write(server: ServerProcess, is_over: Callable[[], bool]) -> list[float]:
    """Create and delete instances until something is true. Returns the seconds that each request took."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    taken: list[float] = []

    def timed(method: str, path: str, body: bytes | None = None) -> bytes:
        began = time.perf_counter()
        connection.request(method, path, body, HEADERS)
        answer = connection.getresponse()
        content = answer.read()
        taken.append(time.perf_counter() - began)
        if answer.status >= 300:
            raise RuntimeError(f"{answer.status}: {content[:300]!r}")
        time.sleep(max(0.0, EVERY_S - taken[-1]))
        return content

    while not (len(taken) % 100 == 0 and is_over()):
        created = json.loads(timed("POST", "/v1/instances", json.dumps(BODY).encode()))
        timed("DELETE", f"/v1/instances/{created['id']}")
    connection.close()
    return taken


class Log:
    """Watches the size of the database's write-ahead log.

    Attributes:
        largest: in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.largest = 0
        self._path = path.with_name(path.name + "-wal")
        self._ended = Event()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> "Log":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.largest = max(self.largest, self._path.stat().st_size if self._path.exists() else 0)


def _report(name: str, times: list[float]) -> None:
    print(f"{name}: {len(times)}, median {median(times) * 1e3:.1f} ms, p99 "
          f"{percentile(times, 0.99) * 1e3:.1f} ms, slowest {max(times) * 1e3:.1f} ms")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("events", nargs="?", type=int, default=1_000_000)
    sys.exit(main(parser.parse_args().events))
