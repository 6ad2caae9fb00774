"""What one project's API requests take while another project floods the server with expensive requests.

    python -m benchmarks.floods [rounds]

A server on SQLite and simulated nodes. The other project has 300 pending instances. Its floods, one after the
other, each from a process of its own with the lowest priority (the clients of an attacker do not use the
server's CPUs):

    explain    48 clients of 6 keys ask why each of the 300 instances is pending
    dry run    48 clients of 6 keys ask whether an instance would start now
    queue      48 clients of 6 keys read the queue
    streams    256 event streams of 8 keys, and 3 keys that create and delete
    polls      256 long polls for events of 8 keys, and 3 keys that create and delete

Printed are the median and p99 of the requests of the first project, without a flood (before and after all of
them) and during each, and the ratios of p99.
"""

import http.client
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
PAUSE_S = 0.02
LARGE = {"image": "busybox:1", "command": ["sleep", "9"], "gpus": {"count": 8}}
SMALL = {"image": "busybox:1", "command": ["sleep", "9"], "cpus": 0.1, "memory_mib": 16}

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Loop:
    """One client that sends its requests in turn, again and again, as soon as it is answered."""

    key: str
    requests: Sequence[tuple[str, str, Mapping[str, object] | None]]
    accept: str = "application/json"


def main(rounds: int) -> int:
    with stack.server_alone() as server, stack.simulated_fleet(server, "4x8xH100"), server.client as admin:
        attacker, victim = _project(admin, "attacker"), _project(admin, "victim")
        pending = [str(admin.create(project_id=attacker, **LARGE)["id"]) for _ in range(PENDING + 4)]
        keys = [_key(admin, victim) for _ in range(VICTIM_KEYS)]
        measure(server.url, keys, 10)  # warm
        idle = measure(server.url, keys, rounds)
        during = {}
        for name, loops in _floods(admin, attacker, pending).items():
            with flood(server.url, loops) as answered:
                time.sleep(FLOODS_FOR_S)
                during[name] = measure(server.url, keys, rounds)
            print(f"{name}: the flood was answered {answered()}", flush=True)
        for what, times in measure(server.url, keys, rounds).items():
            idle[what] += times
    held = [report(name, what, idle[what], times[what]) for name, times in during.items() for what in idle]
    return 0 if all(held) else 1


def report(flood_name: str, what: str, idle: Sequence[float], flooded: Sequence[float]) -> bool:
    figures = "; ".join(
        f"{name} {of(idle) * 1e3:.1f} ms -> {of(flooded) * 1e3:.1f} ms" for name, of in _FIGURES.items()
    )
    print(f"     {flood_name}, {what}: {figures}")
    ratio = percentile(flooded, 0.99) / percentile(idle, 0.99)
    return verdict(f"{flood_name}, {what}, p99 ratio", ratio, BOUND, "x")


def _p99(times: Sequence[float]) -> float:
    return percentile(times, 0.99)


_FIGURES = {"median": median, "p99": _p99}


def measure(url: str, keys: Sequence[str], rounds: int) -> Times:
    """Seconds of each request, sent one after the other with pauses."""
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
    status, content = _ask(connection, key, method, path, body)
    taken[what].append(time.perf_counter() - began)
    if status >= 300:
        raise RuntimeError(f"{method} {path}: {status} {content[:300]!r}")
    return dict(json.loads(content)) if content else {}


def _ask(
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
        shift = max(1, len(requests) // CLIENTS)
        return [
            Loop(own[number % len(own)], [*requests[number * shift :], *requests[: number * shift]])
            for number in range(CLIENTS)
        ]

    def followed(path: str, accept: str) -> list[Loop]:
        own = keys(STREAM_KEYS)
        listening = [Loop(own[number % len(own)], [("GET", path, None)], accept) for number in range(STREAMS)]
        return listening + [Loop(key, [("POST", "/v1/instances", SMALL)]) for key in keys(CREATOR_KEYS)]

    newest = max(int(event["seq"]) for event in admin.items("/v1/events", limit=200))
    return {
        "explain": closed(*(("GET", f"/v1/instances/{each}/explain", None) for each in pending)),
        "dry run": closed(("POST", "/v1/instances?dry_run=true", LARGE)),
        "queue": closed(("GET", "/v1/queue", None)),
        "streams": followed(f"/v1/events?after={newest}", "text/event-stream"),
        "polls": followed("/v1/events?after=99999999&wait_s=60", "application/json"),
    }


@contextmanager
def flood(url: str, loops: Sequence[Loop]) -> Iterator["Answered"]:
    """The loops in a process of their own, which ends with the block."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_flooding, args=(url, loops, theirs))
    process.start()
    answered = Answered()
    try:
        yield answered
    finally:
        ours.send("end")
        if ours.poll(30):
            answered.counts = ours.recv()
        process.kill()
        process.join()


class Answered:
    """How often the flood was answered with which status, once it has ended."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def __call__(self) -> str:
        return ", ".join(f"{count} times {status}" for status, count in sorted(self.counts.items()))


def _flooding(url: str, loops: Sequence[Loop], parent: Connection) -> None:
    os.nice(19)
    counts: Counter[str] = Counter()
    for loop in loops:
        threading.Thread(target=_client, args=(url, loop, counts), daemon=True).start()
    parent.recv()
    parent.send(dict(counts))


def _client(url: str, loop: Loop, counts: Counter[str]) -> None:
    """One that is refused goes on at once, as an attacker would."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    while True:
        for method, path, body in loop.requests:
            try:
                status, _ = _ask(connection, loop.key, method, path, body, loop.accept)
                counts[str(status)] += 1
            except (OSError, http.client.HTTPException) as error:
                counts[type(error).__name__] += 1
                connection.close()
                time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
