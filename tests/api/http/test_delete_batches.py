"""Concurrent deletes in shared transactions: each gets its own result, and no deadlock with other writers."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.context import Context
from mooring.api.http.transactions import BatchedRequest, Call, run_batch
from mooring.api.http.turns import MAX_CONCURRENT_WRITES
from mooring.control import locks
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import instances, placements
from mooring.core.access import Access, Caller, Permission
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.scheduler.model import Placement
from mooring_client.errors import MooringError
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

IMAGE = "mooring-test/busybox:1"
SMALL: dict[str, Any] = {"cpus": 0.1, "memory_mib": 16}
# For tests of locks: SQLite has one writer at a time.
on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


def deletion(project_id: str, instance_id: str, if_match: int | None = None) -> BatchedRequest:
    """A request of a member of the project."""
    permissions = {project_id: frozenset({Permission.READ, Permission.WRITE})}
    caller = Caller("key_d", "key", "d", project_id=project_id, permissions=permissions)
    access = Access(caller, Permission.WRITE, "instance.delete")

    def delete(session: Session) -> StoredAnswer:
        row = instances.delete(session, access, instance_id, if_match)
        return StoredAnswer(202, str(row.desired_state).encode(), {})

    return BatchedRequest(Call(access, None, ""), delete, instance_id)


def run(service: RunningService, requests: Sequence[BatchedRequest]) -> list[str]:
    context: Context = service.service._server._context
    return [_described(result) for result in run_batch(context, requests)]


def _described(result: Response | Exception) -> str:
    if isinstance(result, MooringError):
        return result.code
    return bytes(result.body).decode() if isinstance(result, Response) else repr(result)


@pytest.mark.both_databases
def test_each_delete_of_a_batch_gets_its_own_result(shared_service: RunningService, shared: Client) -> None:
    own, other = (
        shared.post("/v1/projects", json={"name": f"deletes-{name}"}).json()["id"]
        for name in ("own", "other")
    )
    first, changed, last = (shared.create(project_id=own, gpus={"count": 64}) for _ in range(3))
    theirs = shared.create(project_id=other, gpus={"count": 64})
    template = {"image": IMAGE, "gpus": {"count": 64}}
    group = {"count": 2, "template": template, "project_id": own}
    assert shared.post("/v1/instance-groups", json=group).status_code == 201
    member = next(item for item in shared.items("/v1/instances", project_id=own) if item["group_id"])
    results = run(
        shared_service,
        [
            deletion(own, first["id"]), deletion(own, theirs["id"]), deletion(own, member["id"]),
            deletion(own, first["id"]), deletion(own, "ins_none"), deletion(own, changed["id"], if_match=99),
            deletion(own, last["id"]),
        ],
    )  # fmt: skip
    assert results == [
        "deleted", "not_found", "member_of_group", "not_found", "not_found", "precondition_failed", "deleted",
    ]  # fmt: skip
    left = {item["id"] for item in shared.items("/v1/instances", limit=200)}
    assert {theirs["id"], member["id"], changed["id"]} <= left
    # One row of the audit log and one event for each deleted instance (I13).
    recorded = shared.items("/v1/audit-log", project_id=own, action="instance.delete")
    assert Counter(row["target_id"] for row in recorded) == {first["id"]: 1, last["id"]: 1}
    events = shared.items("/v1/events", limit=200)
    deleted = [each["data"]["instance_id"] for each in events if each["data"].get("to") == "deleted"]
    assert Counter(deleted) & Counter([first["id"], last["id"]]) == {first["id"]: 1, last["id"]: 1}


@pytest.mark.both_databases
def test_concurrent_deletes_of_a_project_share_transactions(
    shared_service: RunningService, shared: Client
) -> None:
    """The first batches wait for the writer; later deletes wait for a batch, and take no turns."""
    project = shared.post("/v1/projects", json={"name": "deletes-http"}).json()["id"]
    made = [shared.create(project_id=project, gpus={"count": 64})["id"] for _ in range(20)]
    key = shared.post("/v1/api-keys", json={"name": "k", "project_id": project, "role": "member"}).json()
    context: Context = shared_service.service._server._context
    with Client(shared_service.url, key["key"]) as member, ThreadPoolExecutor(len(made)) as pool:
        assert member.get("/v1/instances").status_code == 200  # the first use of a key is recorded
        with shared_service.plane.database.write() as session:
            locks.instances(session, made)
            answers = [pool.submit(member.delete, f"/v1/instances/{each}") for each in made]
            wait_until(lambda: len(context.deletes) > MAX_CONCURRENT_WRITES)
        assert {answer.result().status_code for answer in answers} == {202}
    assert shared.items("/v1/instances", project_id=project) == []


@pytest.fixture
def nodes(client: Client) -> Iterator[list[WireNode]]:
    """Two nodes, sorted by id."""
    made = [WireNode(client, name) for name in ("one", "two")]
    for node in made:
        node.facts = node.facts.model_copy(update={"labels": {"name": node.name}})
        node.sync()
    yield sorted(made, key=lambda node: node.id)
    for node in made:
        node.close()


def running_on(client: Client, node: WireNode) -> dict[str, Any]:
    made = client.create(node_selector={"name": node.name}, gpus={"count": 1}, **SMALL)
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync(instances=None).assignments
    node.sync(observed(assignment, "running"))
    return made


def _waits_for_a_lock(database: Database) -> bool:
    with database.read() as session:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(session.scalar(query))


@on_postgresql
def test_a_batch_locks_nodes_in_order_before_its_first_operation(
    service: RunningService, client: Client, nodes: list[WireNode]
) -> None:
    low, high = (running_on(client, node) for node in nodes)
    project, results = low["project_id"], list[str]()
    batch = [deletion(project, high["id"]), deletion(project, low["id"])]
    thread = threading.Thread(target=lambda: results.extend(run(service, batch)))
    with service.plane.database.write() as session:
        locks.node(session, nodes[0].id)
        thread.start()
        wait_until(lambda: _waits_for_a_lock(service.plane.database) or results)
        # If the batch had locked the second node first, this would be a deadlock.
        session.execute(text("SELECT id FROM nodes WHERE id = :id FOR UPDATE NOWAIT"), {"id": nodes[1].id})
    thread.join(20)
    assert results == ["deleted", "deleted"]
    assert [client.instance(each["id"])["state"] for each in (low, high)] == ["stopping"] * 2


@on_postgresql
def test_a_delete_during_the_placement_of_its_instance_stops_it_on_its_node(
    service: RunningService, client: Client, node: WireNode
) -> None:
    client.post(f"/v1/nodes/{node.id}/cordon")
    made, other = (client.create(gpus={"count": 1}, **SMALL) for _ in range(2))
    wait_until(lambda: client.instance(made["id"])["reason"]["code"] != "queued")
    project, results = made["project_id"], list[str]()
    batch = [deletion(project, other["id"]), deletion(project, made["id"])]
    thread = threading.Thread(target=lambda: results.extend(run(service, batch)))
    with service.plane.database.write() as session:
        row = session.get_one(Node, node.id)
        row.cordoned = False
        decided = Placement(
            instance_id=made["id"], node_id=node.id, cpu_milli=100, memory_mib=16, allocations=()
        )
        assert placements.assign(session, [decided]) == [made["id"]]
        row.cordoned = True
        placed_at = session.scalars(select(Node.generation).where(Node.id == node.id)).one()
        thread.start()
        wait_until(lambda: _waits_for_a_lock(service.plane.database) or results)
    thread.join(20)
    assert results == ["deleted", "deleted"]
    stopping = client.instance(made["id"])
    assert (stopping["state"], stopping["node_id"]) == ("stopping", node.id)
    with service.plane.database.read() as session:
        # The node's waiting call returns with the delete.
        assert session.get_one(Node, node.id).generation == placed_at + 1
    node.sync(instances=None)
    node.sync()
    assert client.get(f"/v1/instances/{made['id']}").status_code == 404


def test_instances_that_keep_moving_are_deleted_one_by_one(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [client.create(gpus={"count": 64}) for _ in range(2)]
    real = locks._locked_with_nodes
    tries = []

    def moved(*_arguments: object) -> object:
        tries.append(1)
        raise locks._Moved

    monkeypatch.setattr(locks, "_locked_with_nodes", moved)
    assert run(service, [deletion(each["project_id"], each["id"]) for each in made]) == ["deleted"] * 2
    assert len(tries) == locks._TRIES
    monkeypatch.setattr(locks, "_locked_with_nodes", real)
    assert client.items("/v1/instances") == []


@on_postgresql
def test_deletes_creates_placements_and_reports_do_not_deadlock(
    service: RunningService, client: Client, nodes: list[WireNode]
) -> None:
    """Deletes in random order over the nodes, while their reports and new placements lock the same rows."""
    ended = threading.Event()

    def report(node: WireNode) -> None:
        while not ended.is_set():
            assignments = node.sync(instances=None).assignments
            node.sync(*(observed(each, "running") for each in assignments))

    def churn(_number: int) -> list[int]:
        statuses = []
        with service.client as own:
            for _ in range(12):
                answer = own.post("/v1/instances", json={"image": IMAGE, **SMALL})
                statuses += [
                    answer.status_code,
                    own.delete(f"/v1/instances/{answer.json()['id']}").status_code,
                ]
        return statuses

    with ThreadPoolExecutor(len(nodes)) as pool:
        reports = [pool.submit(report, node) for node in nodes]
        try:
            statuses = Counter(each for answers in run_concurrently(12, churn) for each in answers)
        finally:
            ended.set()
        for each in reports:
            each.result()
    assert statuses == {201: 144, 202: 144}
    for node in nodes:
        node.sync(instances=None)
        node.sync()
    assert client.items("/v1/instances") == []
    with service.plane.database.read() as session:
        query = text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        assert session.scalar(query) == 0
