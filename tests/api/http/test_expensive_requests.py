"""Expensive requests of one project do not delay other projects (finding 9 of the audit, decision 22)."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from mooring.api.auth.rules import DRY_RUN_EXTRA, IMMEDIATE_EXTRA, SCHEDULER_COST
from mooring.api.http.turns import MAX_CONCURRENT_WRITES_OF_ADMIN
from mooring.auth.rate_limits import DELAY_S, REQUESTS
from mooring.control.scheduling.cache import SchedulerCache
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.server import REQUEST_THREADS
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until
from tests.waiters import waiters

pytestmark = pytest.mark.both_databases

EVENTS = {"Accept": "text/event-stream"}
THREADS = 40  # more than a server has for requests
PENDING: dict[str, Any] = {"image": "a", "gpus": {"count": 64}}
REQUESTS_OF = {str(action_class): most for action_class, most in REQUESTS.items()}
# A part of the query in `control/events.py`, as SQLAlchemy renders it.
# The scheduling loop reads events too, but not their data.
PAGE_QUERY = "events.data \nFROM events \nWHERE events.seq >"


@pytest.fixture
def limited(service: RunningService, tmp_path: Path) -> Iterator[RunningService]:
    """A second service, with rate limits."""
    with running(settings_for(f"sqlite:///{tmp_path / 'limited.db'}", tmp_path / "limited")) as made:
        yield made


def member(admin: Client, name: str) -> Client:
    """A member's client in a new project. The member has made one request."""
    project = admin.post("/v1/projects", json={"name": name}).json()["id"]
    answer = admin.post("/v1/api-keys", json={"name": name, "role": "member", "project_id": project})
    assert answer.status_code == 201, answer.text
    url, key = str(admin.base_url), answer.json()["key"]
    # The first use of a key is written to the database, which some tests lock.
    with Client(url, key) as first:
        assert first.get("/v1/me").status_code == 200
    return Client(url, key)


@contextmanager
def statements_with(service: RunningService, part: str) -> Iterator[list[str]]:
    """The SQL statements that contain `part` and are executed within the block."""
    seen: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if part in statement:
            seen.append(statement)

    event.listen(service.plane.database.engine, "before_cursor_execute", record)
    try:
        yield seen
    finally:
        event.remove(service.plane.database.engine, "before_cursor_execute", record)


class TestSchedulerTurns:
    """Waiting requests occupy no worker thread."""

    def test_waiting_scheduler_queries_do_not_delay_other_requests(
        self, service: RunningService, client: Client, node: WireNode
    ) -> None:
        made = client.create(gpus={"count": 64})
        path = f"/v1/instances/{made['id']}"
        turns = service.service._server._context.scheduler_turns
        # No pauses after turns: the first one lasts as long as this test needs, and others wait 30 s at most.
        turns._clock = lambda: 0.0
        with member(client, "other") as other, ThreadPoolExecutor(THREADS + 8) as pool:
            with service.service.scheduler_cache.evaluating_lock:
                answers = [pool.submit(client.get, f"{path}/explain") for _ in range(THREADS)]
                answers += [
                    pool.submit(client.post, "/v1/instances?dry_run=true", json=PENDING) for _ in range(4)
                ]
                answers += [pool.submit(client.get, "/v1/queue") for _ in range(4)]
                wait_until(lambda: len(turns) >= THREADS)
                assert other.get("/v1/instances", timeout=8).status_code == 200
                # Immediate placements do not wait for the queries either.
                at_once = client.post("/v1/instances", json={**PENDING, "on_capacity": "fail"}, timeout=8)
                problem(at_once, 409, "insufficient_capacity")
                placed = client.create(gpus={"count": 1}, on_capacity="fail")
                assert placed["state"] == "scheduled"
            assert {answer.result().status_code for answer in answers} == {200}

    @pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
    def test_waiting_writes_do_not_delay_other_requests(
        self, service: RunningService, client: Client
    ) -> None:
        with (
            member(client, "writes") as writer,
            member(client, "other") as other,
            ThreadPoolExecutor(THREADS + 16) as pool,
        ):
            with service.plane.database.only_writer():
                secrets = [{"name": f"s{number}", "value": "v"} for number in range(THREADS + 8)]
                answers = [pool.submit(writer.post, "/v1/secrets", json=secret) for secret in secrets]
                wait_until(lambda: len(service.service._server._context.write_turns) == THREADS + 8)
                batches = service.service._server._context.creates
                answers += [pool.submit(writer.post, "/v1/instances", json=PENDING)]
                wait_until(lambda: batches._running and not len(batches))  # the first one waits in a batch
                answers += [pool.submit(writer.post, "/v1/instances", json=PENDING) for _ in range(7)]
                wait_until(lambda: len(batches) == 7)
                assert other.get("/v1/instances", timeout=8).status_code == 200
            assert {answer.result().status_code for answer in answers} == {201}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
class TestConnections:
    """Requests that wait for a lock leave connections to the loops."""

    @pytest.fixture
    def secret(self, client: Client) -> str:
        """The path of a secret."""
        project = client.post("/v1/projects", json={"name": "p"}).json()["id"]
        made = client.post("/v1/secrets", json={"name": "s", "value": "v", "project_id": project}).json()
        return f"/v1/secrets/{made['id']}"

    def test_a_thread_has_one_connection(self, database_url: str, tmp_path: Path) -> None:
        with running(settings_for(database_url, tmp_path / "data")) as service, service.client as client:
            client.create(gpus={"count": 64})  # `running` checks the connections at its end

    def test_waiting_reads_do_not_take_all_connections(
        self, service: RunningService, client: Client, secret: str
    ) -> None:
        database = service.plane.database
        with ThreadPoolExecutor(THREADS + 8) as pool:
            with locked_secrets(database) as waiting:
                answers = [pool.submit(client.get, secret) for _ in range(THREADS + 8)]
                wait_until(lambda: waiting() >= REQUEST_THREADS)
                with ExitStack() as loops:
                    for _ in range(5):
                        loops.enter_context(database.read()).execute(text("SELECT 1"))
                assert waiting() == REQUEST_THREADS
            assert {answer.result().status_code for answer in answers} == {200}

    def test_an_admin_has_eight_writes_at_a_time(
        self, service: RunningService, client: Client, secret: str
    ) -> None:
        turns = service.service._server._context.admin_write_turns
        with ThreadPoolExecutor(20) as pool:
            with locked_secrets(service.plane.database) as waiting:
                answers = [pool.submit(client.put, secret, json={"value": "w"}) for _ in range(20)]
                wait_until(lambda: len(turns) == 20)
                wait_until(lambda: waiting() == MAX_CONCURRENT_WRITES_OF_ADMIN)
                assert client.get("/v1/projects", timeout=8).status_code == 200
            assert {answer.result().status_code for answer in answers} == {200}


@contextmanager
def locked_secrets(database: Database) -> Iterator[Callable[[], int]]:
    """Lock the table of secrets within the block; the function counts the requests that wait for it.

    The retention loop may wait too, with a query that begins with columns of another table.
    """
    query = text(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE relation = 'secrets'::regclass AND NOT granted AND query ~ '^(SELECT|UPDATE) secrets'"
    )
    with database.engine.connect() as connection:

        def waiting() -> int:
            # Otherwise PostgreSQL shows the activity of the time of the transaction's first look.
            connection.execute(text("SELECT pg_stat_clear_snapshot()"))
            return int(connection.scalar(query) or 0)

        connection.execute(text("LOCK TABLE secrets IN ACCESS EXCLUSIVE MODE"))
        yield waiting


class TestEvaluations:
    """The scheduler evaluates each state of the cluster once."""

    def test_an_evaluation_is_shared_until_the_cluster_changes(
        self, service: RunningService, client: Client, node: WireNode
    ) -> None:
        client.create(gpus={"count": 64})
        scheduler_cache, database = SchedulerCache(), service.plane.database

        def evaluation() -> object:
            with database.read() as session, scheduler_cache.evaluating(session) as found:
                return found

        first = evaluation()
        assert evaluation() is first
        client.create(gpus={"count": 64})
        second = evaluation()
        assert second is not first
        client.post(f"/v1/nodes/{node.id}/cordon")
        assert evaluation() is not second

    def test_explain_includes_an_instance_created_just_before(self, client: Client, node: WireNode) -> None:
        for place in range(1, 6):
            made = client.create(gpus={"count": 64})
            explained = client.get(f"/v1/instances/{made['id']}/explain").json()
            assert explained["queue_position"] == place

    def test_a_dry_run_reports_its_own_queue_position(self, client: Client, node: WireNode) -> None:
        client.create(gpus={"count": 64})
        body = {"image": "a", "gpus": {"count": 64}}
        first = client.post("/v1/instances?dry_run=true", json=body).json()
        assert client.post("/v1/instances?dry_run=true", json=body).json() == first
        other = client.post("/v1/instances?dry_run=true", json={**body, "gpus": {"count": 1}}).json()
        assert (first["placeable"], other["placeable"]) == (False, True)
        assert first["queue_position"] == 2


class TestRates:
    """A request that needs the scheduler counts more than one that reads a row."""

    def test_each_request_counts_by_its_cost(self, limited: RunningService) -> None:
        with limited.client as admin, member(admin, "asks") as caller:
            made = caller.create(gpus={"count": 64})

            def remaining_after(method: str, path: str, **more: Any) -> tuple[str, int]:
                """Send a request; return its class and the remaining requests of that class."""
                answer = caller.request(method, path, **more)
                name, remaining, _ = answer.headers["ratelimit"].split(";")
                return name.strip('"'), int(remaining.removeprefix("r="))

            most = REQUESTS_OF["read"] - 1  # `member` has sent a request
            assert remaining_after("GET", f"/v1/instances/{made['id']}") == ("read", most - 1)
            assert remaining_after("GET", f"/v1/instances/{made['id']}/explain") == (
                "read",
                most - 1 - SCHEDULER_COST,
            )
            assert remaining_after("GET", "/v1/queue") == ("read", most - 1 - 2 * SCHEDULER_COST)
            group = {"name": "g", "count": 2, "template": PENDING}
            most = REQUESTS_OF["write"]
            assert remaining_after("POST", "/v1/instance-groups", json=group) == ("write", most - 2)
            after = most - 3 - DRY_RUN_EXTRA
            assert remaining_after("POST", "/v1/instances?dry_run=true", json=PENDING) == ("write", after)
            after -= 1 + IMMEDIATE_EXTRA
            at_once = {**PENDING, "on_capacity": "fail"}
            assert remaining_after("POST", "/v1/instances", json=at_once) == ("write", after)

    def test_a_request_over_the_limit_is_rejected_with_a_delay_and_its_cost(
        self, limited: RunningService
    ) -> None:
        with limited.client as admin, member(admin, "asks") as caller:
            made = caller.create(gpus={"count": 64})
            path = f"/v1/instances/{made['id']}/explain"
            for _ in range((REQUESTS_OF["read"] - 1) // SCHEDULER_COST):
                assert caller.get(path).status_code == 200
            rejected = caller.get(path)
            assert f"counts as {SCHEDULER_COST}" in problem(rejected, 429, "too_many_requests")["detail"]
            assert rejected.elapsed.total_seconds() >= DELAY_S
            assert caller.get(f"/v1/instances/{made['id']}").status_code == 200
            assert admin.get(path).elapsed.total_seconds() < DELAY_S


class TestEvents:
    """Followers are woken only by events of their own projects and share the reads of pages."""

    FOLLOWERS = 24

    def test_an_event_does_not_wake_followers_of_other_projects(
        self, service: RunningService, client: Client
    ) -> None:
        with (
            member(client, "follows") as follower,
            member(client, "makes") as creator,
            event_streams(service, follower, self.FOLLOWERS) as streams,
            statements_with(service, PAGE_QUERY) as reads,
        ):
            for _ in range(5):
                creator.create(gpus={"count": 64})
            assert len(reads) == 0
            made = follower.create(gpus={"count": 64})
            assert {next(stream)["data"]["instance_id"] for stream in streams} == {made["id"]}

    def test_followers_of_one_project_share_their_reads(
        self, service: RunningService, client: Client
    ) -> None:
        with (
            member(client, "follows") as follower,
            event_streams(service, follower, self.FOLLOWERS) as streams,
            statements_with(service, PAGE_QUERY) as reads,
        ):
            made = [follower.create(gpus={"count": 64})["id"] for _ in range(3)]
            for stream in streams:
                assert [next(stream)["data"]["instance_id"] for _ in made] == made
            # Unshared, each follower would read once per event, and once more to find no other event.
            assert len(reads) <= self.FOLLOWERS


@contextmanager
def event_streams(
    service: RunningService, by: Client, count: int
) -> Iterator[list[Iterator[dict[str, Any]]]]:
    """Event streams that are waiting for new events."""
    with ExitStack() as stack:
        lines = []
        for _ in range(count):
            answer = stack.enter_context(by.stream("GET", "/v1/events", headers=EVENTS))
            assert answer.status_code == 200
            lines.append(answer.iter_lines())
        signals = service.plane.database.signals
        project = by.get("/v1/projects").json()["items"][0]["id"]
        wait_until(lambda: waiters(signals, Topic.project_events(project)) == count)
        yield [_events(each) for each in lines]


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield dict(json.loads(line.removeprefix("data: ")))
