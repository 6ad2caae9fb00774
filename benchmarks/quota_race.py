"""64 simultaneous creates against a quota, on both databases: are exactly as many accepted as it allows?

    python -m benchmarks.quota_race [--rounds 200]

Each round uses a new project with a quota of GPUs, instances or CPUs in turn. The clients are 64 open
connections that send at the same time. A round is exact if as many requests as the quota allows return 201,
all others return 403 `quota_exceeded`, and the instances in the database use the quota exactly.
"""

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Engine, create_engine, func, select, text
from tests.service import ADMIN_KEY, Client
from tests.testbed.postgres import PostgresCluster
from tests.walk.product import ServerProcess

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from mooring.db.session import normalized
from mooring.db.tables import Instance
from mooring.db.tables.work import ACTIVE

CLIENTS = 64
BODY: dict[str, Any] = {"image": "busybox:1", "gpus": {"count": 1}, "cpus": 1, "memory_mib": 64}
KINDS = ("gpus", "instances", "cpus")


class Crowd:
    """64 connections in threads, each of which sends one request per round at the same time."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url).netloc
        self._connections = [http.client.HTTPConnection(address, timeout=60) for _ in range(CLIENTS)]
        for connection in self._connections:
            connection.connect()
        self._pool = ThreadPoolExecutor(CLIENTS)

    def send_all(self, body: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        content = json.dumps(body).encode()
        barrier = threading.Barrier(CLIENTS)

        def one(connection: http.client.HTTPConnection) -> tuple[int, dict[str, Any]]:
            barrier.wait(60)
            connection.request("POST", "/v1/instances", content, _HEADERS)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

        return list(self._pool.map(one, self._connections))

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


_HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}


def main(rounds: int) -> int:
    exact = [_is_always_exact(kind, rounds) for kind in ("sqlite", "postgresql")]
    return 0 if all(exact) else 1


def _is_always_exact(kind: str, rounds: int) -> bool:
    with _server(kind) as server:
        return verdict(f"{kind}: exact rounds", _exact_rounds(kind, server, rounds), rounds, at_least=True)


@contextmanager
def _server(kind: str) -> Iterator[ServerProcess]:
    with ExitStack() as exits:
        settings = {"MOORING_RATE_LIMITS": "off"}
        if kind == "postgresql":
            cluster = PostgresCluster(exits.enter_context(stack.workspace()))
            exits.callback(cluster.destroy)
            cluster.start()
            settings["MOORING_DATABASE_URL"] = cluster.create_database()
        yield exits.enter_context(stack.server_alone(**settings))


def _exact_rounds(kind: str, server: ServerProcess, rounds: int) -> int:
    engine = create_engine(normalized(server.database_url))
    crowd = Crowd(server.url)
    exact, taken = 0, []
    with server.client as admin:
        for number in range(rounds):
            limit = 1 + number * 7 % (CLIENTS - 1)
            quota = KINDS[number % len(KINDS)]
            project_id = _project(admin, number, {quota: limit})
            began = time.perf_counter()
            answers = crowd.send_all(BODY | {"project_id": project_id})
            taken.append(time.perf_counter() - began)
            exact += _is_exact(number, quota, limit, answers, _used(engine, project_id, quota))
            _clear(admin, answers)
    crowd.close()
    engine.dispose()
    slowest = percentile(taken, 1)
    print(f"{kind}: {rounds} rounds of {CLIENTS}: median {median(taken):.2f} s, slowest {slowest:.2f} s")
    return exact


def _project(admin: Client, number: int, quotas: dict[str, int]) -> str:
    made = admin.post("/v1/projects", json={"name": f"race-{number}"}).raise_for_status().json()
    admin.patch(f"/v1/projects/{made['id']}", json={"quotas": quotas}).raise_for_status()
    return str(made["id"])


def _used(engine: Engine, project_id: str, quota: str) -> float:
    """The used amount, read directly from the database."""
    amount = func.sum(Instance.gpu_count) if quota == "gpus" else func.count()
    query = select(amount).select_from(Instance).where(Instance.project_id == project_id, text(ACTIVE))
    with engine.connect() as connection:
        # Each instance has one CPU, so that the number of instances is that of CPUs.
        return float(connection.scalar(query) or 0)


def _is_exact(
    number: int, quota: str, limit: int, answers: Sequence[tuple[int, dict[str, Any]]], used: float
) -> bool:
    counted = Counter((status, answer.get("code"), answer.get("quota")) for status, answer in answers)
    wanted = Counter({(201, None, None): limit, (403, "quota_exceeded", quota): CLIENTS - limit})
    if (counted, used) == (wanted, limit):
        return True
    print(f"round {number}, {quota} {limit}: {dict(counted)}, {used:g} used")
    return False


def _clear(admin: Client, answers: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Delete the instances, which would slow down later rounds."""
    for status, answer in answers:
        if status == 201:
            admin.delete(f"/v1/instances/{answer['id']}").raise_for_status()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    sys.exit(main(parser.parse_args().rounds))
