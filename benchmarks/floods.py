"""Latency of one project's API requests while another project floods the server with expensive ones.

    python -m benchmarks.floods [rounds] [--only NAME ...]

Runs a server on SQLite with simulated nodes. The other project has 300 pending instances. Its floods run one
after the other, each in a separate process with the lowest priority. The simulated nodes have this priority
too, because real clients and nodes do not use the server's CPUs.

    explain    48 clients with 6 keys explain each of the pending instances
    dry run    48 clients with 6 keys try whether an instance would start now
    queue      48 clients with 6 keys read the queue
    writes     48 clients with 6 keys replace labels
    creates    3 clients with a key each create instances as fast as their rate limits permit
    streams    256 event streams with 8 keys, and the same creates
    polls      256 long polls for events with 8 keys, and the same creates

Prints the median and p99 per kind of request of the first project, before and during each flood, and the
ratio of the p99 of all its requests.
"""

import argparse
import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from tests.service import Client

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict

BOUND = 3.0
PENDING = 300
CLIENTS = 48
STREAMS = 256
ATTACKER_KEYS = 6
STREAM_KEYS = 8
CREATOR_KEYS = 3
VICTIM_KEYS = 8
FLOODS_FOR_S = 3.0  # before measuring begins
REST_S = 5.0  # after each flood
PAUSE_S = 0.02
LARGE = {"image": "busybox:1", "command": ["sleep", "9"], "gpus": {"count": 8}}
SMALL = {"image": "busybox:1", "command": ["sleep", "9"], "cpus": 0.1, "memory_mib": 16}

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Loop:
    """A client that repeats its requests in turn, each as soon as the last one is answered."""

    key: str
    requests: Sequence[tuple[str, str, Mapping[str, object] | None]]
    accept: str = "application/json"


def main(rounds: int, only: Sequence[str]) -> int:
    with (
        stack.server_alone() as server,
        stack.simulated_fleet(server, "4x8xH100", elsewhere=True),
        server.client as admin,
    ):
        attacker, victim = _project(admin, "attacker"), _project(admin, "victim")
        pending = [str(admin.create(project_id=attacker, **LARGE)["id"]) for _ in range(PENDING + 4)]
        keys = [_key(admin, victim) for _ in range(VICTIM_KEYS)]
        measure(server.url, keys, 10)  # warm
        idle: Times = defaultdict(list)
        during = {}
        for name, loops in _floods(admin, attacker, pending).items():
            if only and name not in only:
                continue
            for what, times in measure(server.url, keys, rounds).items():
                idle[what] += times
            with flood(server.url, loops) as answered:
                time.sleep(FLOODS_FOR_S)
                during[name] = measure(server.url, keys, rounds)
            print(f"{name}: answers to the flood: {answered()}", flush=True)
            time.sleep(REST_S)
    print(f"{rounds} rounds during each flood, and as many before each")
    passed = [report(name, idle, times) for name, times in during.items()]
    return 0 if all(passed) else 1


def report(flood_name: str, idle: Times, flooded: Times) -> bool:
    """Print the figures of one flood. Returns whether its ratio is within the bound."""
    for what in idle:
        print(f"     {flood_name}, {what}: {_figures(idle[what], flooded[what])}")
    before, during = (list(itertools.chain(*times.values())) for times in (idle, flooded))
    print(f"     {flood_name}, all: {_figures(before, during)}")
    return verdict(f"{flood_name}, p99 ratio", _p99(during) / _p99(before), BOUND, "x")


def _figures(idle: Sequence[float], flooded: Sequence[float]) -> str:
    of = {"median": median, "p99": _p99}
    return "; ".join(
        f"{name} {each(idle) * 1e3:.1f} ms -> {each(flooded) * 1e3:.1f} ms" for name, each in of.items()
    )


def _p99(times: Sequence[float]) -> float:
    return percentile(times, 0.99)


def measure(url: str, keys: Sequence[str], rounds: int) -> Times:
    """Seconds per request, sent one after the other with pauses."""
    taken: Times = defaultdict(list)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    for number in range(rounds):
        key = keys[number % len(keys)]
        made = _timed(taken, "create", connection, key, "POST", "/v1/instances", SMALL)
        path = f"/v1/instances/{made['id']}"
        for _ in range(2):
            _timed(taken, "get", connection, key, "GET", path)
            _timed(taken, "list", connection, key, "GET", "/v1/instances?limit=10")
            _timed(taken, "readyz", connection, key, "GET", "/readyz")
        _timed(taken, "delete", connection, key, "DELETE", path)
    connection.close()
    return taken


def _timed(
    taken: Times,
    what: str,
    connection: http.client.HTTPConnection,
    key: str,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
) -> dict[str, object]:
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    status, content = _send(connection, key, method, path, body)
    taken[what].append(time.perf_counter() - began)
    if status >= 300:
        raise RuntimeError(f"{method} {path}: {status} {content[:300]!r}")
    return dict(json.loads(content)) if content else {}


def _send(
    connection: http.client.HTTPConnection,
    key: str,
    method: str,
    path: str,
    body: Mapping[str, object] | None,
    accept: str = "application/json",
) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Accept": accept}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _project(admin: Client, name: str) -> str:
    answer = admin.post("/v1/projects", json={"name": name})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _key(admin: Client, project_id: str) -> str:
    body = {"name": "bench", "role": "member", "project_id": project_id}
    answer = admin.post("/v1/api-keys", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


def _floods(admin: Client, project_id: str, pending: Sequence[str]) -> dict[str, list[Loop]]:
    def keys(count: int) -> list[str]:
        return [_key(admin, project_id) for _ in range(count)]

    def closed(*requests: tuple[str, str, Mapping[str, object] | None]) -> list[Loop]:
        own = keys(ATTACKER_KEYS)
        shift = max(1, len(requests) // CLIENTS)  # so that clients do not send equal requests at once
        return [
            Loop(own[number % len(own)], [*requests[number * shift :], *requests[: number * shift]])
            for number in range(CLIENTS)
        ]

    def followed(path: str, accept: str) -> list[Loop]:
        own = keys(STREAM_KEYS)
        listening = [Loop(own[number % len(own)], [("GET", path, None)], accept) for number in range(STREAMS)]
        return listening + creates()

    def creates() -> list[Loop]:
        return [Loop(key, [("POST", "/v1/instances", SMALL)]) for key in keys(CREATOR_KEYS)]

    newest = max(int(event["seq"]) for event in admin.items("/v1/events", limit=200))
    return {
        "explain": closed(*(("GET", f"/v1/instances/{each}/explain", None) for each in pending)),
        "dry run": closed(("POST", "/v1/instances?dry_run=true", LARGE)),
        "queue": closed(("GET", "/v1/queue", None)),
        "writes": closed(("PATCH", f"/v1/instances/{pending[0]}", {"labels": {"of": "the flood"}})),
        "creates": creates(),
        "streams": followed(f"/v1/events?after={newest}", "text/event-stream"),
        "polls": followed(f"/v1/events?after={newest}&wait_s=60", "application/json"),
    }


@contextmanager
def flood(url: str, loops: Sequence[Loop]) -> Iterator["Answered"]:
    """Runs the loops in a separate process until the end of the block."""
    context = get_context("spawn")
    here, in_child = context.Pipe()
    process = context.Process(target=_run_flood, args=(url, loops, in_child))
    process.start()
    answered = Answered()
    try:
        yield answered
    finally:
        here.send("end")
        if here.poll(30):
            answered.counts = here.recv()
        process.kill()
        process.join()


class Answered:
    """The number of answers to the flood by status, once it has ended."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def __call__(self) -> str:
        return ", ".join(f"{count} x {status}" for status, count in sorted(self.counts.items()))


def _run_flood(url: str, loops: Sequence[Loop], parent: Connection) -> None:
    os.nice(stack.LOWEST_PRIORITY)
    counts: Counter[str] = Counter()
    for loop in loops:
        threading.Thread(target=_client, args=(url, loop, counts), daemon=True).start()
    parent.recv()
    parent.send(dict(counts))


def _client(url: str, loop: Loop, counts: Counter[str]) -> None:
    """Send the requests of a loop for ever, also at once after a rejected one, as an attacker does."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    while True:
        for method, path, body in loop.requests:
            try:
                status, _ = _send(connection, loop.key, method, path, body, loop.accept)
                counts[str(status)] += 1
            except (OSError, http.client.HTTPException) as error:
                counts[type(error).__name__] += 1
                connection.close()
                time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", nargs="?", type=int, default=60)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    sys.exit(main(given.rounds, given.only))
