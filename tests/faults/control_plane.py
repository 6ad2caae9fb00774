"""Faults of the control plane's processes, and races of its users."""

import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.concurrency import run_concurrently
from tests.faults.fleet import READY_WITHIN_S
from tests.faults.trial import Fault, Trial
from tests.service import Client
from tests.walk.product import ServerProcess

_READY_CPU_S = 10
_KILLS = 4
_RACES = 3
_RACERS = 64
_GPUS = 8
_REPEATED = 4
_REPEATERS = 100
_SLOW = 500
_STREAMS = 40  # of one key, which may have 32
_FOLLOWERS = 24  # of one project on one node, which may have 16


def kill_replicas(trial: Trial) -> None:
    """F2. The others serve meanwhile."""
    slowest_s = 0.0
    for _ in range(_KILLS):
        replica = trial.rng.choice(trial.fleet.replicas)
        replica.kill()
        trial.hold(trial.rng.uniform(0, 2))
        trial.require(trial.admin.get("/v1/instances").status_code == 200, "no other replica serves")
        slowest_s = max(slowest_s, _restart(trial, replica))
    trial.note(f"{_KILLS} kills, ready after at most {slowest_s:.1f} s")


def _restart(trial: Trial, replica: ServerProcess) -> float:
    began = time.monotonic()
    replica.start(READY_WITHIN_S)
    trial.require(replica.processor_s() < _READY_CPU_S, f"{replica.processor_s()} s of CPU until ready")
    return time.monotonic() - began


def race_for_gpus(trial: Trial) -> None:
    """F16. A project may use eight GPUs, and 64 of its clients ask for one each, all at once."""
    winners = 0
    for number in range(_RACES):
        answers = _race(trial)
        statuses = Counter(answer.status_code for answer in answers)
        expected = {201: _GPUS, 403: _RACERS - _GPUS}
        trial.require(statuses == expected, f"I10: race {number} had {statuses} instead of {expected}")
        winners += statuses[201]
        for answer in answers:
            if answer.status_code == 201:
                trial.delete(answer.json()["id"])
    trial.note(f"{_RACES} races, {winners} winners")


def _race(trial: Trial) -> list[httpx.Response]:
    requests = [(trial.name("race"), trial.key()) for _ in range(_RACERS)]
    with _member(trial, trial.name("race"), gpus=_GPUS) as member:
        return run_concurrently(_RACERS, lambda number: trial.create(member, *requests[number]))


def repeat_one_create(trial: Trial) -> None:
    """F17. 100 clients send one request with one key; every second time, a replica is killed meanwhile."""
    for number in range(_REPEATED):
        answers = _repeat(trial, with_kill=bool(number % 2))
        bodies = {answer.content for answer in answers}
        statuses = {answer.status_code for answer in answers}
        trial.require(statuses == {201}, f"I3: the repetitions were answered {statuses}")
        trial.require(len(bodies) == 1, f"I3: the repetitions have {len(bodies)} bodies: {bodies}")
        trial.delete(answers[0].json()["id"])
    trial.note(f"{_REPEATED * _REPEATERS} repetitions, {_REPEATED} instances")


def _repeat(trial: Trial, *, with_kill: bool) -> list[httpx.Response]:
    name, key = trial.name("repeated"), trial.key()
    killer = threading.Thread(target=_kill_soon, args=[trial, trial.rng.uniform(0, 0.5)])
    if with_kill:
        killer.start()
    with Client(trial.fleet.public.url) as client:
        answers = run_concurrently(_REPEATERS, lambda _: trial.create(client, name, key))
    if with_kill:
        killer.join()
        trial.fleet.heal()
    return answers


def _kill_soon(trial: Trial, after_s: float) -> None:
    trial.hold(after_s)
    trial.rng.choice(trial.fleet.replicas).kill()


def flood_with_slow_clients(trial: Trial) -> None:
    """F24. 500 clients that send heads slowly, event streams and log followers beyond their limits."""
    replica = trial.fleet.replicas[0]
    idle_s = _slowest_percent_s(replica)
    with ExitStack() as stack:
        for _ in range(_SLOW):
            _send(stack, replica, b"GET /v1/instances HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        member = stack.enter_context(_member(trial, trial.name("streams")))
        streams = Counter(
            _status(_send(stack, replica, _streaming(member, "/v1/events"))) for _ in range(_STREAMS)
        )
        # In the default project: others may use no image that was only loaded on the node.
        made = trial.create(trial.admin, trial.name("followed"), trial.key(), gpus={}).json()
        trial.admin.wait(made["id"], "running", 60)
        path = f"/v1/instances/{made['id']}/logs?follow=true"
        others = [stack.enter_context(_client_with_key(trial, made["project_id"])) for _ in range(2)]
        followers = Counter(
            _status(_send(stack, replica, _streaming(others[n % 2], path))) for n in range(_FOLLOWERS)
        )
        busy_s = _slowest_percent_s(replica)
    trial.require(streams == {200: 32, 429: _STREAMS - 32}, f"event streams: {streams}")
    trial.require(followers == {200: 16, 429: _FOLLOWERS - 16}, f"log followers: {followers}")
    trial.require(busy_s <= max(0.3, 5 * idle_s), f"others' GET: p99 {busy_s:.3f} s, without {idle_s:.3f} s")
    trial.note(f"others' GET p99 {busy_s * 1000:.0f} ms, before {idle_s * 1000:.0f} ms")
    trial.delete(made["id"])


def _slowest_percent_s(replica: ServerProcess) -> float:
    """The 99th percentile of the time of a GET."""
    took = []
    with replica.client as client:
        for _ in range(300):
            began = time.monotonic()
            assert client.get("/v1/instances", params={"limit": 10}).status_code == 200
            took.append(time.monotonic() - began)
    return sorted(took)[-3]


def _send(stack: ExitStack, replica: ServerProcess, request: bytes) -> socket.socket:
    """Send bytes on a connection that stays open until the stack is closed."""
    parts = urlsplit(replica.url)
    made = socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=30)
    stack.callback(made.close)
    made.sendall(request)
    return made


def _streaming(client: Client, path: str) -> bytes:
    key = client.headers["Authorization"]
    head = ["Host: x", f"Authorization: {key}", "Accept: text/event-stream"]
    return "\r\n".join([f"GET {path} HTTP/1.1", *head, "", ""]).encode()


def _status(connection: socket.socket) -> int:
    return int(connection.recv(4096).split(b" ", 2)[1])


def _member(trial: Trial, project: str, **quotas: float) -> Client:
    """A client with a key of a new project."""
    made = _posted(trial.admin, "/v1/projects", name=project)
    changed = trial.admin.patch(f"/v1/projects/{made['id']}", json={"quotas": quotas})
    assert changed.status_code == 200, changed.text
    return _client_with_key(trial, made["id"])


def _client_with_key(trial: Trial, project_id: str) -> Client:
    made = _posted(trial.admin, "/v1/api-keys", name="trial", project_id=project_id, role="member")
    return Client(trial.fleet.public.url, key=made["key"])


def _posted(client: Client, path: str, **body: Any) -> dict[str, Any]:
    answer: httpx.Response = client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


FAULTS = (
    Fault("F2", "kill -9 a replica", kill_replicas),
    Fault("F16", "64 clients race for 8 GPUs of a quota", race_for_gpus),
    Fault("F17", "one Idempotency-Key, 100 times at once, with kills", repeat_one_create),
    Fault("F24", "500 slow clients, event streams, log followers", flood_with_slow_clients),
)
