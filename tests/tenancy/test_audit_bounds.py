"""What the audit log takes in beyond what was done, and what it never takes in."""

import json
from typing import Any

import pytest

from mooring.api.auth.audited_reads import RECORD_INTERVAL_S, AuditedReads
from mooring.api.http import responses, transactions
from mooring.control.audit import audit_log
from mooring.control.audit.refusals import MAX_CALLERS, MAX_NAMES, RejectedRequests
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import projects
from mooring.core.access import Caller, on_host
from mooring.loops.refusals import RefusedRequests
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import World, make_key

pytestmark = pytest.mark.both_databases


def _rows(client: Client, **filters: Any) -> list[dict[str, Any]]:
    return client.items("/v1/audit-log", limit=200, **filters)


def test_of_a_command_only_the_program_is_recorded(world: World) -> None:
    command = ["nvidia-smi", "--token", "canary-of-exec"]
    world.admin.wait(world.running, "running")
    answer = world.a.member.post(f"/v1/instances/{world.running}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    row = _rows(world.a.owner, action="instance.exec")[0]
    assert (row["target_id"], row["after"]) == (world.running, {"program": "nvidia-smi"})
    assert "canary-of-exec" not in json.dumps(_rows(world.admin))


@pytest.mark.parametrize("rows", [0, 2])
def test_what_writes_not_exactly_one_row_is_undone(world: World, rows: int) -> None:
    """The guard behind every operation, by a verb that is wrong."""
    context = world.service.service._server._context
    access = on_host("project.create")

    def act(session: Any) -> StoredAnswer:
        row = projects.new("never-to-be-seen", {})
        session.add(row)
        for _ in range(rows):
            audit_log.record(session, access, row.id, row.id)
        return responses.json_answer({})

    with pytest.raises(AssertionError, match=r"project\.create must write exactly one row"):
        transactions.audited(context, access, act)
    assert "never-to-be-seen" not in [row["name"] for row in world.admin.items("/v1/projects", limit=200)]


def test_an_admin_who_reads_logs_of_a_project_of_others_is_recorded_once_in_a_while(world: World) -> None:
    key = make_key(world.admin, scopes=["admin"], name="curious")
    with Client(world.service.url, key["key"]) as curious:
        for _ in range(3):
            assert curious.get(f"/v1/instances/{world.running}/logs").status_code == 200
    (row,) = _rows(world.a.owner, actor_id=key["id"])
    assert (row["action"], row["target_id"]) == ("instance.read_logs", world.running)
    before = len(_rows(world.a.owner, action="instance.read_logs"))
    assert world.a.viewer.get(f"/v1/instances/{world.running}/logs").status_code == 200
    assert len(_rows(world.a.owner, action="instance.read_logs")) == before


def test_a_read_is_recorded_again_after_a_while() -> None:
    clock = [0.0]
    reads = AuditedReads(lambda: clock[0])
    assert reads._is_new("key_1", "instance.read_logs", "ins_1")
    clock[0] = RECORD_INTERVAL_S - 1
    assert not reads._is_new("key_1", "instance.read_logs", "ins_1")
    assert reads._is_new("key_2", "instance.read_logs", "ins_1")
    clock[0] = RECORD_INTERVAL_S
    assert reads._is_new("key_1", "instance.read_logs", "ins_1")
    for number in range(20_000):
        reads._is_new("key_1", "instance.read_logs", str(number))
    assert len(reads._recorded) == 10_000


def test_an_export_is_recorded_with_what_was_asked_for(world: World) -> None:
    filters = {"action": "user.create", "project_id": world.a.id}
    answer = world.b.owner.get("/v1/audit-log", params=filters, headers={"Accept": "application/x-ndjson"})
    assert (answer.status_code, answer.text) == (200, "")
    row = _rows(world.b.owner, action="audit.export")[0]
    assert (row["project_id"], row["after"]) == (world.b.id, {"filters": filters})
    assert row["id"] not in [other["id"] for other in _rows(world.a.owner)]


def test_refused_requests_are_counted_into_one_row_for_each_caller(world: World) -> None:
    context = world.service.service._server._context
    recorder = RefusedRequests(context.database, context.refusals)
    recorder.tick()
    key = make_key(world.a.owner, role="viewer", name="prying")
    with Client(world.service.url, key["key"]) as prying:
        for _ in range(3):
            problem(prying.post("/v1/instances", json={"image": "busybox:1"}), 403)
        problem(prying.delete(f"/v1/instances/{world.waiting}"), 403)
    with Client(world.service.url, "mk_a-key-that-nobody-was-given-0123456789") as stranger:
        for _ in range(5):
            problem(stranger.get("/v1/instances"), 401)
    recorder.tick()
    recorder.tick()
    (row,) = _rows(world.admin, actor_id=key["id"])
    assert (row["action"], row["actor"]["name"]) == ("access.forbidden", "prying")
    assert row["after"] == {"refused": 4, "operations": {"create_instance": 3, "delete_instance": 1}}
    row = _rows(world.admin, action="access.unauthorized")[0]
    assert row["after"]["refused"] >= 5
    assert row["after"]["addresses"].keys() == {"127.0.0.1"}


def test_a_full_quota_is_no_refused_attempt(world: World) -> None:
    context = world.service.service._server._context
    project = f"/v1/projects/{world.b.id}"
    assert world.admin.patch(project, json={"quotas": {"instances": 0}}).status_code == 200
    context.refusals.take()
    problem(world.b.member.post("/v1/instances", json={"image": "busybox:1"}), 403, "quota_exceeded")
    assert context.refusals.take() == []
    assert world.admin.patch(project, json={"quotas": {}}).status_code == 200


def test_a_flood_of_refusals_makes_a_bounded_number_of_rows() -> None:
    refusals = RejectedRequests()
    for number in range(1000):
        refusals.forbidden(Caller(f"key_{number}", "key", "x"), f"operation-{number % 50}")
        refusals.unauthorized(f"10.0.{number // 256}.{number % 256}")
    taken = refusals.take()
    assert len(taken) <= MAX_CALLERS + 2
    assert sum(one.names.total() for one in taken) == 2000
    assert max(len(one.names) for one in taken) == MAX_NAMES + 1
    assert refusals.take() == []
