"""Audited reads and rejected requests, and limits of what is recorded."""

import json
from typing import Any

import pytest

from mooring.api.auth.audited_reads import RECORD_INTERVAL_S, AuditedReads
from mooring.api.http import responses, transactions
from mooring.control.audit import audit_log
from mooring.control.audit.rejected_requests import MAX_CALLERS, MAX_NAMES, RejectedRequests
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import projects
from mooring.core.access import Caller, on_host
from mooring.loops.rejected_requests import RejectionAudit
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import Setup, make_key

pytestmark = pytest.mark.both_databases


def _rows(client: Client, **filters: Any) -> list[dict[str, Any]]:
    return client.items("/v1/audit-log", limit=200, **filters)


def test_a_command_is_recorded_with_its_arguments_and_without_its_output(setup: Setup) -> None:
    command = ["echo", "one", "two"]
    setup.admin.wait(setup.running, "running")
    answer = setup.a.member.post(f"/v1/instances/{setup.running}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    row = _rows(setup.a.owner, action="instance.exec")[0]
    assert (row["target_id"], row["after"]["command"]) == (setup.running, command)
    assert row["after"]["bytes_out"] == len("one two\n")
    assert "one two" not in json.dumps(row)


def test_the_arguments_of_a_long_command_are_recorded_as_their_hash(setup: Setup) -> None:
    setup.admin.wait(setup.running, "running")
    body = {"command": ["echo", "x" * 30_000]}
    answer = setup.a.member.post(f"/v1/instances/{setup.running}/exec", json=body)
    assert answer.status_code == 200, answer.text
    recorded = _rows(setup.a.owner, action="instance.exec")[0]["after"]["command"]
    assert recorded.keys() == {"sha256", "bytes"}


@pytest.mark.parametrize("rows", [0, 2])
def test_an_operation_that_does_not_write_exactly_one_row_is_rolled_back(setup: Setup, rows: int) -> None:
    """Tests the check behind every operation with a faulty operation."""
    context = setup.service.service._server._context
    access = on_host("project.create")

    def act(session: Any) -> StoredAnswer:
        row = projects.new("never-to-be-seen", {})
        session.add(row)
        for _ in range(rows):
            audit_log.record(session, access, row.id, row.id)
        return responses.json_answer({})

    with pytest.raises(AssertionError, match=r"project\.create must write exactly one row"):
        transactions.audited(context, access, act)
    assert "never-to-be-seen" not in [row["name"] for row in setup.admin.items("/v1/projects", limit=200)]


def test_reads_of_logs_by_an_admin_of_another_project_are_recorded_once(setup: Setup) -> None:
    key = make_key(setup.admin, scopes=["admin"], name="curious")
    with Client(setup.service.url, key["key"]) as reader:
        for _ in range(3):
            assert reader.get(f"/v1/instances/{setup.running}/logs").status_code == 200
    (row,) = _rows(setup.a.owner, actor_id=key["id"])
    assert (row["action"], row["target_id"]) == ("instance.read_logs", setup.running)
    before = len(_rows(setup.a.owner, action="instance.read_logs"))
    assert setup.a.viewer.get(f"/v1/instances/{setup.running}/logs").status_code == 200
    assert len(_rows(setup.a.owner, action="instance.read_logs")) == before


def test_a_read_is_recorded_again_after_an_interval() -> None:
    clock = [0.0]
    reads = AuditedReads(lambda: clock[0])
    assert reads._is_new("key_1", "instance.read_logs", "ins_1")
    clock[0] = RECORD_INTERVAL_S - 1
    assert not reads._is_new("key_1", "instance.read_logs", "ins_1")
    assert reads._is_new("key_2", "instance.read_logs", "ins_1")
    clock[0] = RECORD_INTERVAL_S
    assert reads._is_new("key_1", "instance.read_logs", "ins_1")
    # The number of remembered reads is limited.
    for number in range(20_000):
        reads._is_new("key_1", "instance.read_logs", str(number))
    assert len(reads._recorded) == 10_000


def test_an_export_is_recorded_with_its_filters(setup: Setup) -> None:
    filters = {"action": "user.create", "project_id": setup.a.id}
    answer = setup.b.owner.get("/v1/audit-log", params=filters, headers={"Accept": "application/x-ndjson"})
    assert (answer.status_code, answer.text) == (200, "")
    row = _rows(setup.b.owner, action="audit.export")[0]
    assert (row["project_id"], row["after"]) == (setup.b.id, {"filters": filters})
    assert row["id"] not in [other["id"] for other in _rows(setup.a.owner)]


def test_rejected_requests_are_counted_in_one_row_per_caller(setup: Setup) -> None:
    context = setup.service.service._server._context
    recorder = RejectionAudit(context.database, context.rejected_requests)
    recorder.tick()  # records the rejected requests of earlier tests
    key = make_key(setup.a.owner, role="viewer", name="prying")
    with Client(setup.service.url, key["key"]) as caller:
        for _ in range(3):
            problem(caller.post("/v1/instances", json={"image": "busybox:1"}), 403)
        problem(caller.delete(f"/v1/instances/{setup.pending}"), 403)
    with Client(setup.service.url, "mk_a-key-that-nobody-was-given-0123456789") as unauthorized:
        for _ in range(5):
            problem(unauthorized.get("/v1/instances"), 401)
    recorder.tick()
    recorder.tick()  # records nothing again
    (row,) = _rows(setup.admin, actor_id=key["id"])
    assert (row["action"], row["actor"]["name"]) == ("access.forbidden", "prying")
    assert row["after"] == {"refused": 4, "operations": {"create_instance": 3, "delete_instance": 1}}
    row = _rows(setup.admin, action="access.unauthorized")[0]
    assert row["after"]["refused"] >= 5
    assert row["after"]["addresses"].keys() == {"127.0.0.1"}


def test_an_exceeded_quota_is_not_recorded_as_a_rejected_request(setup: Setup) -> None:
    context = setup.service.service._server._context
    project = f"/v1/projects/{setup.b.id}"
    assert setup.admin.patch(project, json={"quotas": {"instances": 0}}).status_code == 200
    context.rejected_requests.take()
    problem(setup.b.member.post("/v1/instances", json={"image": "busybox:1"}), 403, "quota_exceeded")
    assert context.rejected_requests.take() == []
    assert setup.admin.patch(project, json={"quotas": {}}).status_code == 200


def test_the_number_of_rows_about_rejected_requests_is_limited() -> None:
    refusals = RejectedRequests()
    for number in range(1000):
        refusals.forbidden(Caller(f"key_{number}", "key", "x"), f"operation-{number % 50}")
        refusals.unauthorized(f"10.0.{number // 256}.{number % 256}")
    taken = refusals.take()
    assert len(taken) <= MAX_CALLERS + 2
    assert sum(one.names.total() for one in taken) == 2000
    assert max(len(one.names) for one in taken) == MAX_NAMES + 1
    assert refusals.take() == []
