"""Latency of one project's start, stop, logs and exec on a node that another project abuses.

    python -m benchmarks.abuse [rounds]

Runs a server and one node with a real dockerd. Measures on the idle node, then again while the other project
runs all of this at once: 64 pulls from a very slow registry, 64 followed logs, 64 stops of programs that
ignore their stop signal, and a fork bomb. Prints the median and p95 of both, and their ratios.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
from tests.service import Client
from tests.testbed.slow_registry import slow_registry
from tests.testbed.waiting import wait_until

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from mooring.core.instance.state import ENDED

MANY = 64
BOUND = 2.0
TINY = {"cpus": 0.01, "memory_mib": 16, "disk_mib": 64}
SMALL = {"cpus": 0.1, "memory_mib": 64, "disk_mib": 64}
IGNORES_SIGTERM = ["sh", "-c", "trap '' TERM; while :; do sleep 3600 & wait $!; done"]
PRINTS = ["sh", "-c", "while :; do date; sleep 0.1; done"]
FORK_BOMB = ["sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100000"]
REST_S = 0.3

Times = dict[str, list[float]]


class Project:
    """A project; each of its keys has separate rate limits."""

    def __init__(self, made: stack.Stack, name: str) -> None:
        self._made = made
        answer = made.admin.post("/v1/projects", json={"name": name})
        assert answer.status_code == 201, answer.text
        self.id = str(answer.json()["id"])
        # The image of the test bed is local.
        allowed = made.admin.patch(f"/v1/projects/{self.id}", json={"local_images": True})
        assert allowed.status_code == 200, allowed.text

    def new_client(self) -> Client:
        body = {"name": "bench", "role": "member", "project_id": self.id}
        answer = self._made.admin.post("/v1/api-keys", json=body)
        assert answer.status_code == 201, answer.text
        return Client(self._made.server.url, str(answer.json()["key"]))

    def create(self, **fields: object) -> str:
        """As an admin, who has no rate limit, since the node is measured."""
        return str(self._made.admin.create(project_id=self.id, **fields)["id"])

    def running(self, count: int, command: list[str], **size: float) -> list[str]:
        made = [self.create(command=command, **size) for _ in range(count)]
        for instance_id in made:
            self._made.admin.wait(instance_id, "running", 60)
        return made


def main(rounds: int) -> int:
    with stack.on_docker(gpus=0) as made:
        victim, attacker = Project(made, "victim"), Project(made, "attacker")
        measure(victim, 3)  # warm
        idle = measure(victim, rounds)
        with ExitStack() as abuses:
            for abuse in (stubborn_stops, followed_logs, slow_pulls, fork_bomb):
                abuses.enter_context(abuse(made, attacker))
            abused = measure(victim, rounds)
            print(f"{rounds} rounds, idle -> abused")
            passed = [report(what, idle[what], abused[what]) for what in idle]
        return 0 if all(passed) else 1


def report(what: str, idle: list[float], abused: list[float]) -> bool:
    """Print the figures of one operation. Returns whether its ratios are within the bound."""
    holds = True
    for name, of in (("median", median), ("p95", lambda times: percentile(times, 0.95))):
        before, during = of(idle), of(abused)
        print(f"     {what} {name}: {before * 1e3:.0f} ms -> {during * 1e3:.0f} ms")
        holds &= verdict(f"{what} {name} ratio", during / before, BOUND, "x")
    return holds


def measure(victim: Project, rounds: int) -> Times:
    """Seconds per operation; a start ends when the client reads `running`, a stop at `stopped`."""
    taken: Times = defaultdict(list)
    with victim.new_client() as client:
        for _ in range(rounds):
            time.sleep(REST_S)
            _round(client, taken)
    return taken


def _round(client: Client, taken: Times) -> None:
    with _timed(taken, "start"):
        instance_id = str(client.create(**SMALL)["id"])
        client.wait(instance_id, "running", 60)
    path = f"/v1/instances/{instance_id}"
    with _timed(taken, "logs"):
        assert client.get(f"{path}/logs").status_code == 200
    with _timed(taken, "exec"):
        ran = client.post(f"{path}/exec", json={"command": ["echo", "here"]})
        assert ran.json().get("stdout") == "here\n", ran.text
    with _timed(taken, "stop"):
        client.post(f"{path}/stop", json={"timeout_s": 30})
        client.wait(instance_id, "stopped", 60)
    client.delete(path)
    wait_until(lambda: client.get(path).status_code == 404, 60, 0.05)


@contextmanager
def _timed(taken: Times, what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    taken[what].append(time.perf_counter() - began)


# --- the abuse. Add a full disk where nodes enforce disk limits.


@contextmanager
def stubborn_stops(made: stack.Stack, attacker: Project) -> Iterator[None]:
    """Programs that ignore their stop signal, with a stop timeout of an hour."""
    stubborn = attacker.running(MANY, IGNORES_SIGTERM, **TINY)
    for instance_id in stubborn:
        made.admin.post(f"/v1/instances/{instance_id}/stop", json={"timeout_s": 3600})
    yield
    for instance_id in stubborn:
        assert made.admin.instance(instance_id)["state"] == "stopping"


@contextmanager
def followed_logs(made: stack.Stack, attacker: Project) -> Iterator[None]:
    """With three keys, since one may not follow so many; the node rejects what exceeds its limit."""
    (printing,) = attacker.running(1, PRINTS, **SMALL)
    with ExitStack() as open_:
        clients = [open_.enter_context(attacker.new_client()) for _ in range(3)]

        def follow(number: int) -> httpx.Response:
            request = clients[number % 3].build_request("GET", f"/v1/instances/{printing}/logs?follow=true")
            return clients[number % 3].send(request, stream=True)

        with ThreadPoolExecutor(MANY) as pool:
            answers = list(pool.map(follow, range(MANY)))
        for answer in answers:
            open_.callback(answer.close)
        admitted = sum(answer.status_code == 200 for answer in answers)
        print(f"followed logs: {admitted} of {MANY} admitted")
        assert admitted
        yield


@contextmanager
def slow_pulls(made: stack.Stack, attacker: Project) -> Iterator[None]:
    address = urlsplit(made.server.url).hostname
    assert address is not None
    with slow_registry(address, "layers", bytes_per_s=2000) as slow:
        for number in range(MANY):
            attacker.create(image=slow.image(f"slow-{number}"), **TINY)
        wait_until(lambda: slow.pulls() > 0, 30)
        yield


@contextmanager
def fork_bomb(made: stack.Stack, attacker: Project) -> Iterator[None]:
    """Within its limits of pids, CPU and memory."""
    (bomb,) = attacker.running(1, FORK_BOMB, **SMALL)
    yield
    # Otherwise its many processes make the teardown of the node slow.
    made.admin.post(f"/v1/instances/{bomb}/stop", json={"timeout_s": 0})
    # It may already have failed for lack of memory.
    wait_until(lambda: made.admin.instance(bomb)["state"] in ENDED, 60, 0.5)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
