"""Concurrent requests in shared transactions: who shares one, and that none suffers from another."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.context import Context
from mooring.api.http import batches
from mooring.api.http.batches import MAX_REQUESTS, Batches
from mooring.api.http.transactions import BatchedRequest, Call, Operation, run_batch
from mooring.control.audit import audit_log
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import instances
from mooring.control.tenants import projects
from mooring.control.tenants.storage import StorageLimits
from mooring.core.access import Access, Caller, Permission
from mooring_client.errors import MooringError, NameTaken, TooManyRequests
from mooring_client.schemas.instances import InstanceCreate
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until


@dataclass(frozen=True, eq=False)
class Named:
    """A request of the queue's tests."""

    name: str
    project: str
    key: str | None = None


class Runner:
    """Runs batches that wait until `release`."""

    def __init__(self) -> None:
        self.began: list[list[str]] = []
        self._released = threading.Semaphore(0)
        self._began = threading.Condition()

    def __call__(self, batch: Sequence[Named]) -> list[Response | Exception]:
        with self._began:
            self.began.append([request.name for request in batch])
            self._began.notify_all()
        assert self._released.acquire(timeout=20)
        return [
            KeyError(request.name) if request.name == "fails" else Response(request.name) for request in batch
        ]

    def release(self, batches: int = 1) -> None:
        self._released.release(batches)

    async def running(self, count: int) -> None:
        def wait() -> None:
            with self._began:
                assert self._began.wait_for(lambda: len(self.began) == count, 20)

        await asyncio.to_thread(wait)


def test_requests_that_come_while_a_batch_runs_share_the_next_one() -> None:
    async def check() -> None:
        queue, runner = Batches[Named](), Runner()

        def start(name: str, project: str, key: str | None = None) -> asyncio.Task[Response]:
            return asyncio.create_task(queue.run(Named(name, project, key), runner, 1))

        tasks = [start("first", "a")]
        await runner.running(1)
        tasks += [start(f"a{number}", "a") for number in range(MAX_REQUESTS)]
        tasks += [start("b0", "b"), start("b1", "b", "key"), start("b2", "b", "key"), start("fails", "c")]
        runner.release(4)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # One request of each project in turn; the second with the same key waits for the first one's answer.
        assert runner.began[0] == ["first"]
        assert runner.began[1][:6] == ["a0", "b0", "fails", "a1", "b1", "a2"]
        assert "b2" in runner.began[2]
        assert [len(batch) for batch in runner.began] == [1, MAX_REQUESTS, 4]
        answered = [
            bytes(result.body).decode() if isinstance(result, Response) else repr(result)
            for result in results
        ]
        assert answered == [
            "first",
            *(f"a{n}" for n in range(MAX_REQUESTS)),
            "b0",
            "b1",
            "b2",
            "KeyError('fails')",
        ]
        assert not len(queue)

    asyncio.run(check())


def test_a_cancelled_request_is_not_run_unless_its_batch_has_begun() -> None:
    async def check() -> None:
        queue, runner = Batches[Named](), Runner()
        running = asyncio.create_task(queue.run(Named("running", "a"), runner, 1))
        await runner.running(1)
        waiting, other = (
            asyncio.create_task(queue.run(Named(name, "a"), runner, 1)) for name in ("waiting", "other")
        )
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        cancelled = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(each) for each in cancelled] == [asyncio.CancelledError] * 2
        assert len(queue) == 1
        runner.release(2)
        assert (await other).body == b"other"
        assert runner.began == [["running"], ["other"]]

    asyncio.run(check())


def test_a_request_that_no_batch_takes_in_time_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_WAIT_S", 0.05)

    async def check() -> None:
        queue, runner = Batches[Named](), Runner()
        running = asyncio.create_task(queue.run(Named("running", "a"), runner, 1))
        await runner.running(1)
        with pytest.raises(TooManyRequests):
            await queue.run(Named("late", "a"), runner, 1)
        assert not len(queue)
        runner.release()
        assert (await running).body == b"running"  # it waited longer, but for its own batch

    asyncio.run(check())


class Tenant:
    """A project, and requests of its key that create instances."""

    def __init__(self, service: RunningService, admin: Client, name: str, **settings: Any) -> None:
        self.context: Context = service.service._server._context
        self.admin = admin
        self.id = str(admin.post("/v1/projects", json={"name": name}).json()["id"])
        if settings:
            answer = admin.patch(f"/v1/projects/{self.id}", json=settings)
            assert answer.status_code == 200, answer.text
        permissions = {self.id: frozenset({Permission.READ, Permission.WRITE})}
        caller = Caller(f"key_{name}", "key", name, project_id=self.id, permissions=permissions)
        self.access = Access(caller, Permission.WRITE, "instance.create")

    def request(self, key: str | None = None, **fields: Any) -> BatchedRequest:
        body = InstanceCreate.model_validate({"image": "a:1", "gpus": {"count": 64}, **fields})

        def create(session: Session) -> StoredAnswer:
            project = projects.for_new(session, self.access, None, "")
            row = instances.create(session, self.access, project, body)
            return StoredAnswer(201, row.name.encode(), {})

        return self.running(create, key, str(fields))

    def running(self, operation: Operation, key: str | None = None, fingerprint: str = "") -> BatchedRequest:
        return BatchedRequest(Call(self.access, key, fingerprint if key else ""), operation)

    def run(self, *requests: BatchedRequest) -> list[str]:
        """The result of each request: the name of its instance, or the code of its error."""
        return list(map(_described, run_batch(self.context, requests)))

    @property
    def names(self) -> list[str]:
        return sorted(item["name"] for item in self.admin.items("/v1/instances", project_id=self.id))


def _described(result: Response | Exception) -> str:
    if isinstance(result, MooringError):
        return result.code
    if isinstance(result, Exception):
        return type(result).__name__
    assert result.status_code == 201
    replayed = " (replayed)" if "idempotency-replayed" in result.headers else ""
    return bytes(result.body).decode() + replayed


NewTenant = Callable[..., Tenant]


@pytest.fixture
def tenant(shared_service: RunningService, shared: Client) -> NewTenant:
    def new(name: str, **settings: Any) -> Tenant:
        return Tenant(shared_service, shared, name, **settings)

    return new


def test_each_request_of_a_batch_gets_its_own_result(tenant: NewTenant, shared: Client) -> None:
    first = tenant("batch-a", allowed_images=["a"])
    second = tenant("batch-b", quotas={"instances": 2})
    first.run(first.request(name="taken"))
    results = first.run(
        first.request(name="a0"), second.request(name="b0"), first.request(name="taken"),
        first.request(name="x", image="other:1"), second.request(name="b1"), first.request(name="a1"),
        second.request(name="b2"), first.request(name="a1"),
    )  # fmt: skip
    assert results == [
        "a0",
        "b0",
        "name_taken",
        "image_not_allowed",
        "b1",
        "a1",
        "quota_exceeded",
        "name_taken",
    ]
    assert (first.names, second.names) == (["a0", "a1", "taken"], ["b0", "b1"])
    # One row of the audit log and one event for each created instance (I13).
    for each, count in ((first, 3), (second, 2)):
        recorded = shared.items("/v1/audit-log", project_id=each.id, action="instance.create")
        assert len(recorded) == count
    for item in shared.items("/v1/instances", project_id=first.id):
        assert [event["data"]["to"] for event in shared.items(f"/v1/instances/{item['id']}/events")][:1] == [
            "pending"
        ]


def test_a_repeated_key_in_a_later_batch_is_replayed(tenant: NewTenant) -> None:
    each = tenant("batch-keys", quotas={"instances": 2})
    assert each.run(each.request("k1", name="one"), each.request("k2", name="two")) == ["one", "two"]
    results = each.run(
        each.request("k1", name="one"), each.request("k2", name="another"), each.request("k3", name="three")
    )
    assert results == ["one (replayed)", "idempotency_key_reused", "quota_exceeded"]
    # The key of a request that failed is free again.
    assert each.admin.patch(f"/v1/projects/{each.id}", json={"quotas": {"instances": 3}}).status_code == 200
    assert each.run(each.request("k3", name="three"), each.request(name="four")) == [
        "three",
        "quota_exceeded",
    ]
    assert each.names == ["one", "three", "two"]


def test_a_failure_of_one_request_does_not_fail_the_others(tenant: NewTenant) -> None:
    each = tenant("batch-bug")

    def bug(session: Session) -> StoredAnswer:
        raise KeyError("bug")

    def writes_and_raises(session: Session) -> StoredAnswer:
        audit_log.record(session, each.access, None, each.id)
        raise NameTaken("too late")

    def inserts_and_raises(session: Session) -> StoredAnswer:
        ghost = InstanceCreate.model_validate({"image": "a:1", "gpus": {"count": 64}})
        session.add(instances.new_row(each.id, ghost, "ghost"))
        raise NameTaken("too late")

    def writes_no_audit_row(session: Session) -> StoredAnswer:
        return StoredAnswer(201, b"", {})

    for operation, result in (
        (bug, "KeyError"), (writes_and_raises, "name_taken"),
        (inserts_and_raises, "name_taken"), (writes_no_audit_row, "AssertionError"),
    ):  # fmt: skip
        name = operation.__name__.replace("_", "-")
        requests = [
            each.request(name=f"before-{name}"),
            each.running(operation),
            each.request(name=f"after-{name}"),
        ]
        assert each.run(*requests) == [f"before-{name}", result, f"after-{name}"]
    assert len(each.names) == 8


def test_a_project_that_is_full_does_not_fail_the_others(
    tenant: NewTenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, other = tenant("batch-full"), tenant("batch-roomy")
    env = {f"V{number}": "x" * 24_000 for number in range(7)}
    monkeypatch.setattr(type(full.context), "storage_limits", StorageLimits(1024 * 1024, 2**40))
    results = full.run(
        *(full.request(name=f"f{number}", env=env) for number in range(9)), other.request(name="fits")
    )
    assert results == [*(f"f{number}" for number in range(6)), *["quota_exceeded"] * 3, "fits"]
    assert (len(full.names), other.names) == (6, ["fits"])


def test_all_requests_of_a_batch_fail_at_once_without_a_database(tenant: NewTenant) -> None:
    each = tenant("batch-outage")
    database = each.context.database
    attempts: list[object] = []

    def unavailable(session: Session) -> StoredAnswer:
        attempts.append(session)
        # As a lost connection does: an error without a code of the server.
        raise OperationalError("SELECT 1", None, Exception("server closed the connection"))

    results = each.run(*(each.running(unavailable) for _ in range(5)))
    assert results == ["OperationalError"] * 5
    assert len(attempts) == 1
    assert database.engine.pool is not None


def test_concurrent_creates_over_http_each_get_their_instance(
    shared_service: RunningService, shared: Client
) -> None:
    """The writer is blocked while more requests come than a batch takes. Each key comes twice."""
    count = 2 * MAX_REQUESTS
    context: Context = shared_service.service._server._context
    project = shared.post("/v1/projects", json={"name": "batch-http"}).json()["id"]
    body = {"image": "mooring-test/busybox:1", "gpus": {"count": 64}, "project_id": project}

    def create(number: int) -> httpx.Response:
        key = f"k{number // 2}"
        with shared_service.client as each:
            return each.post("/v1/instances", json={**body, "name": key}, headers={"Idempotency-Key": key})

    with ThreadPoolExecutor(count) as pool:
        with shared_service.plane.database.only_writer():
            answers = [pool.submit(create, number) for number in range(count)]
            wait_until(lambda: len(context.creates) >= MAX_REQUESTS or answers[0].done())
        done = [answer.result() for answer in answers]
    assert {answer.status_code for answer in done} == {201}
    by_name = {answer.json()["name"]: answer.content for answer in done}
    assert all(by_name[answer.json()["name"]] == answer.content for answer in done)
    assert sum("idempotency-replayed" in answer.headers for answer in done) == MAX_REQUESTS
    assert sorted(by_name) == sorted(
        item["name"] for item in shared.items("/v1/instances", project_id=project, limit=200)
    )
