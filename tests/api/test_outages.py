"""The service reports outages of PostgreSQL and recovers without a restart."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from mooring.db import migrate
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until


@pytest.fixture
def cluster(new_postgres_cluster: NewPostgresCluster) -> PostgresCluster:
    return new_postgres_cluster(durable=False)


@pytest.fixture
def service(cluster: PostgresCluster, tmp_path: Path) -> Iterator[RunningService]:
    url = cluster.create_database()
    migrate.upgrade(url)
    with running(settings_for(url, tmp_path / "data")) as made:
        yield made


def test_the_service_recovers_after_a_crash_of_the_database(
    cluster: PostgresCluster, client: Client, node: WireNode
) -> None:
    before = client.create(gpus={"count": 1})
    client.wait(before["id"], "scheduled")
    (assignment,) = node.sync().assignments
    node.sync(observed(assignment, "running"))
    cluster.kill()

    for answer in (
        client.get("/v1/instances"),
        client.get(f"/v1/instances/{before['id']}"),
        client.post("/v1/instances", json={"image": "a"}, headers={"Idempotency-Key": "while-away"}),
        client.delete(f"/v1/instances/{before['id']}"),
        client.get(f"/v1/instances/{before['id']}/wait"),
        client.get("/v1/events"),
        client.get("/metrics"),
        client.get("/readyz"),
        node.post_sync(observed(assignment, "running")),
    ):
        document = problem(answer, 503, "database_unavailable")
        assert document["retryable"] is True
        assert int(answer.headers["retry-after"]) >= 1
        assert "postgresql" not in document["detail"]
    assert client.get("/healthz").status_code == 200

    cluster.start()
    wait_until(lambda: client.get("/readyz").status_code == 200, 20)
    assert client.instance(before["id"])["state"] == "running"
    assert [item["id"] for item in client.items("/v1/instances")] == [before["id"]]
    # The loops have reconnected too.
    after = client.post("/v1/instances", json={"image": "a"}, headers={"Idempotency-Key": "while-away"})
    assert after.status_code == 201
    client.wait(after.json()["id"], "scheduled")
    node.sync(observed(assignment, "running"))


def test_a_database_restart_under_load_causes_only_503_and_loses_no_created_instance(
    cluster: PostgresCluster, client: Client
) -> None:
    statuses: set[int] = set()
    acknowledged: list[str] = []
    done = threading.Event()

    def load() -> None:
        with Client(str(client.base_url)) as own:
            while not done.is_set():
                answer = own.post("/v1/instances", json={"image": "a", "gpus": {"count": 64}})
                statuses.add(answer.status_code)
                if answer.status_code == 201:
                    acknowledged.append(answer.json()["id"])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(acknowledged) > 20, 30)
    cluster.stop()
    wait_until(lambda: 503 in statuses)
    cluster.start()
    count = len(acknowledged)
    wait_until(lambda: len(acknowledged) > count + 20, 30)
    done.set()
    for thread in threads:
        thread.join(30)
    assert statuses == {201, 503}
    known: set[str] = set()
    cursor: str | None = ""
    while cursor is not None:
        page = client.get(
            "/v1/instances", params={"limit": 200} | ({"cursor": cursor} if cursor else {})
        ).json()
        known |= {item["id"] for item in page["items"]}
        cursor = page["next_cursor"]
    assert set(acknowledged) <= known


def test_every_request_is_answered_while_the_database_hangs(cluster: PostgresCluster, client: Client) -> None:
    """More requests than the service has connections and threads, before it knows that the database hangs."""
    made = client.create(gpus={"count": 64})

    def request(number: int) -> httpx.Response:
        with Client(str(client.base_url)) as own:
            if number % 2:
                return own.get(f"/v1/instances/{made['id']}", timeout=60)
            body = {"image": "a", "gpus": {"count": 64}}
            return own.post("/v1/instances", json=body, timeout=60)

    cluster.freeze()
    try:
        for answer in run_concurrently(100, request):
            problem(answer, 503, "database_unavailable")
        problem(client.get("/readyz"), 503, "database_unavailable")
        # Requests that need no database are answered.
        assert client.get("/healthz").status_code == 200
        assert client.get("/docs").status_code == 200
    finally:
        cluster.thaw()
    wait_until(lambda: client.get("/readyz").status_code == 200, 20)
    assert client.instance(made["id"])["id"] == made["id"]


def test_an_event_stream_ends_with_an_error_when_the_database_goes_away(
    cluster: PostgresCluster, service: RunningService, client: Client
) -> None:
    client.create()
    with client.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("id: ")
        cluster.kill()
        # Each commit of this process would wake the stream; without a database there is none.
        service.plane.database.signals.fire_all()
        data = [line for line in lines if line.startswith("data: ")]
    error = json.loads(data[-1].removeprefix("data: "))["error"]
    assert error["code"] == "database_unavailable"
    cluster.start()


def _overwrite(file: Path, at: int, content: bytes) -> None:
    """In place: while the file is empty, a loop of the service would see a database without tables."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


@pytest.mark.parametrize("damaged", ["header", "tables"])
def test_a_damaged_database_is_reported(tmp_path: Path, damaged: str) -> None:
    file = tmp_path / "mooring.db"
    with running(settings_for(f"sqlite:///{file}", tmp_path / "data")) as service, service.client as client:
        created = client.create()
        with service.plane.database.only_writer():
            service.plane.database.dispose()  # the pages that it has read
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            content = file.read_bytes()
            begin, end = (0, 100) if damaged == "header" else (4096, len(content))
            _overwrite(file, begin, bytes([255]) * (end - begin))
        for answer in (client.get(f"/v1/instances/{created['id']}"), client.get("/v1/instances")):
            document = problem(answer, 503, "database_unavailable")
            assert "restore a backup" in document["detail"]
        _overwrite(file, 0, content)
        service.plane.database.dispose()
