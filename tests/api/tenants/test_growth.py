"""A single key cannot fill the database (finding 4 of the audit): the attacks, and the rows that remain."""

import sqlite3
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import String, cast, func, select

from mooring.db.tables import AuditEntry, IdempotencyKey, Instance, InstanceGroup
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed, output, status
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

IMAGE = "mooring-test/busybox:1"
MIB = 1024 * 1024
# 224 KiB of the 256 KiB that a spec may have; random, since PostgreSQL would compress repetitions.
LARGE_ENV = {f"V{number}": b64encode(Random(number).randbytes(24_576)).decode() for number in range(7)}
# 17 KiB, nearly the largest labels that are accepted.
LARGE_LABELS = {f"label-{number}": "y" * 255 for number in range(63)}
# Deleted instances and idempotency keys expire at once; the loop that removes them runs every second.
SHORTEST_RETENTION = {"deleted_kept_days": 1e-6, "idempotency_kept_hours": 1e-6}


@contextmanager
def serving(database_url: str, folder: Path, **settings: Any) -> Iterator[RunningService]:
    with running(settings_for(database_url, folder / "data", rate_limits="off", **settings)) as made:
        yield made


def member_of_new_project(admin: Client, **quotas: Any) -> Client:
    """A client with a member's key of a new project."""
    project = admin.post("/v1/projects", json={"name": "small"}).json()["id"]
    if quotas:
        assert admin.patch(f"/v1/projects/{project}", json={"quotas": quotas}).status_code == 200
    key = admin.post("/v1/api-keys", json={"name": "k", "project_id": project, "role": "member"}).json()
    return Client(str(admin.base_url), key["key"])


def size(url: str) -> int:
    """Bytes on disk. SQLite: file and log after a checkpoint. PostgreSQL: the database after VACUUM."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(path, timeout=10)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        log = path.with_name(path.name + "-wal")
        return path.stat().st_size + (log.stat().st_size if log.exists() else 0)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM")
        found = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert found is not None
        return int(found[0])


def require_shrinking(url: str, most: int) -> None:
    """Wait until the database has less than `most` bytes; else show what is large, and who keeps old rows."""
    try:
        wait_until(lambda: size(url) < most, 60)
    except AssertionError:
        if url.startswith("sqlite"):
            raise
        with psycopg.connect(url) as connection:
            largest = connection.execute(
                "SELECT relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup"
                " FROM pg_stat_user_tables ORDER BY 2 DESC LIMIT 5"
            ).fetchall()
            readers = connection.execute(
                "SELECT pid, datname, state, backend_xmin, xact_start, query FROM pg_stat_activity"
                " WHERE backend_xmin IS NOT NULL"
            ).fetchall()
        raise AssertionError(f"{size(url)} bytes: {largest}, {readers}") from None


def rows(service: RunningService, table: type[Instance | IdempotencyKey]) -> int:
    with service.plane.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_creates_and_deletes_under_a_quota_of_one_do_not_grow_the_database(
    database_url: str, tmp_path: Path
) -> None:
    """Each create stores a spec of 224 KiB."""
    with (
        serving(database_url, tmp_path, **SHORTEST_RETENTION) as service,
        service.client as admin,
        member_of_new_project(admin, instances=1) as member,
    ):
        before = size(database_url)
        for number in range(60):
            made = member.post(
                "/v1/instances",
                json={"image": IMAGE, "env": LARGE_ENV},
                headers={"Idempotency-Key": f"key-{number}"},
            )
            assert made.status_code == 201, made.text
            assert member.delete(f"/v1/instances/{made.json()['id']}").status_code == 202
        wait_until(lambda: rows(service, Instance) == rows(service, IdempotencyKey) == 0, 60)
        require_shrinking(database_url, before + 5 * MIB)


def test_a_groups_template_is_stored_once(database_url: str, tmp_path: Path) -> None:
    with (
        serving(database_url, tmp_path) as service,
        service.client as admin,
        member_of_new_project(admin) as member,
    ):
        before = size(database_url)
        for _ in range(3):
            made = member.post(
                "/v1/instance-groups",
                json={"count": 64, "template": {"image": IMAGE, "env": LARGE_ENV}},
            )
            assert made.status_code == 201, made.text
        assert size(database_url) < before + 5 * MIB
        first = member.get("/v1/instances", params={"limit": 1}).json()["items"][0]
        assert first["env"] == LARGE_ENV
        assert member.instance(first["id"])["env"] == LARGE_ENV


def test_large_labels_are_not_repeated_in_the_audit_log(client: Client, service: RunningService) -> None:
    made = client.create()
    for number in range(3):
        labels = {**LARGE_LABELS, "number": str(number)}
        assert client.patch(f"/v1/instances/{made['id']}", json={"labels": labels}).status_code == 200
    stored = func.length(cast(AuditEntry.before, String)) + func.length(cast(AuditEntry.after, String))
    with service.plane.database.read() as session:
        largest = session.scalar(select(func.max(stored)).where(AuditEntry.action == "instance.update"))
    assert largest is not None
    assert largest < 2 * 4096
    after = client.items("/v1/audit-log", limit=1)[0]["after"]
    assert after["labels"]["bytes"] > 16_000
    assert len(after["labels"]["sha256"]) == 64
    assert client.instance(made["id"])["labels"] == labels


def test_large_command_output_is_not_stored_and_the_command_runs_once(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path, key = f"/v1/instances/{assignment.instance_id}/exec", f"large-{sandbox.node.name}"
    answers: list[httpx.Response] = []

    def post() -> None:
        made = sandbox.client.post(path, json={"command": ["id"]}, headers={"Idempotency-Key": key})
        answers.append(made)

    thread = threading.Thread(target=post)
    thread.start()
    (stream,) = wait_until(sandbox.node.stream_requests)
    sandbox.node.bring(stream.id, output("z" * 224 * 1024), status(0))
    thread.join(20)
    assert (answers[0].status_code, len(answers[0].json()["stdout"])) == (200, 224 * 1024)
    assert _stored_body(sandbox.service, key) == 0
    post()
    refused = problem(answers[1], 409, "replay_too_large")
    assert (refused["first_status"], refused["location"]) == (200, None)
    assert sandbox.node.stream_requests() == []


def _stored_body(service: RunningService, key: str) -> int:
    with service.plane.database.read() as session:
        stored = session.scalar(select(func.length(IdempotencyKey.body)).where(IdempotencyKey.key == key))
    return stored or 0


def test_a_large_answer_is_not_stored_and_its_repeat_has_the_location(client: Client) -> None:
    body = {"image": IMAGE, "env": LARGE_ENV}
    first, again = (
        client.post("/v1/instances", json=body, headers={"Idempotency-Key": "large"}) for _ in range(2)
    )
    assert first.status_code == 201
    refused = problem(again, 409, "replay_too_large")
    assert refused["location"] == first.headers["location"]
    assert client.get(refused["location"]).json()["id"] == first.json()["id"]
    assert len(client.items("/v1/instances")) == 1


def test_the_stored_bytes_of_a_project_are_limited(database_url: str, tmp_path: Path) -> None:
    with (
        serving(database_url, tmp_path, project_stored_mib=1) as service,
        service.client as admin,
        member_of_new_project(admin) as member,
    ):
        made = [member.create(env=LARGE_ENV)["id"] for _ in range(4)]
        refused = problem(
            member.post("/v1/instances", json={"image": IMAGE, "env": LARGE_ENV}), 403, "quota_exceeded"
        )
        assert (refused["quota"], refused["limit"]) == ("stored_bytes", MIB)
        assert 4 * 224 * 1024 < refused["used"] < MIB < refused["used"] + refused["asked"]
        template = {"image": IMAGE, "env": LARGE_ENV}
        group = member.post("/v1/instance-groups", json={"count": 1, "template": template})
        problem(group, 403, "quota_exceeded")
        small = [member.create(labels=LARGE_LABELS)["id"]]
        while (
            answer := member.post("/v1/instances", json={"image": IMAGE, "labels": LARGE_LABELS})
        ).is_success:
            small.append(answer.json()["id"])
        problem(answer, 403, "quota_exceeded")
        problem(
            member.patch(f"/v1/instances/{made[0]}", json={"labels": LARGE_LABELS}), 403, "quota_exceeded"
        )
        assert member.instance(made[0])["labels"] == {}
        # Requests that free space and other projects are never rejected.
        assert member.patch(f"/v1/instances/{small[0]}", json={"labels": {}}).status_code == 200
        assert member.delete(f"/v1/instances/{made[0]}").status_code == 202
        admin.create(env=LARGE_ENV)


def test_the_written_bytes_of_a_project_per_day_are_limited(database_url: str, tmp_path: Path) -> None:
    with (
        serving(database_url, tmp_path, project_written_mib_per_day=1) as service,
        service.client as admin,
        member_of_new_project(admin) as member,
    ):
        instance_id = member.create()["id"]

        def change() -> httpx.Response:
            return member.patch(f"/v1/instances/{instance_id}", json={"labels": LARGE_LABELS})

        answers = [change() for _ in range(60)]
        refused = problem(answers[-1], 429, "daily_write_limit")
        assert sum(answer.status_code == 200 for answer in answers) > 40
        assert refused["limit"] == MIB < refused["used"] + refused["asked"]
        assert 0 < int(answers[-1].headers["retry-after"]) <= 86_400
        creates = [member.post("/v1/instances", json={"image": IMAGE}) for _ in range(10)]
        problem(creates[-1], 429, "daily_write_limit")
        assert member.delete(f"/v1/instances/{instance_id}").status_code == 202
        admin.create()


@pytest.fixture
def group(sandbox: Sandbox) -> dict[str, Any]:
    template = {
        "image": IMAGE, "env": {"A": "1"}, "command": ["a", "b"], "working_dir": "/w", "user": "u",
        "node_selector": {"sandbox": sandbox.node.name}, "ports": [{"container": 80}],
    }  # fmt: skip
    body = {"name": sandbox.node.name, "count": 2, "template": template}
    made = sandbox.client.post("/v1/instance-groups", json=body)
    assert made.status_code == 201, made.text
    return dict(made.json())


def _stored_spec(sandbox: Sandbox, instance_id: str) -> dict[str, Any]:
    with sandbox.service.plane.database.read() as session:
        return dict(session.get_one(Instance, instance_id).spec)


@pytest.mark.parametrize("made_by", ["this release", "an earlier one"])
def test_a_member_is_shown_and_started_with_its_groups_template(
    sandbox: Sandbox, group: dict[str, Any], made_by: str
) -> None:
    ids = [member["instance_id"] for member in group["members"]]
    assert "env" not in _stored_spec(sandbox, ids[0])
    if made_by == "an earlier one":
        with sandbox.service.plane.database.write() as session:
            row = session.get_one(InstanceGroup, group["id"])
            for instance_id in ids:
                session.get_one(Instance, instance_id).spec = dict(row.template)
    for instance_id in ids:
        shown = sandbox.client.instance(instance_id)
        for name, value in group["template"].items():
            assert shown[name] == value, name
        listed = sandbox.client.items("/v1/instances", name=shown["name"])[0]
        assert (listed["env"], listed["command"]) == ({"A": "1"}, ["a", "b"])
        sandbox.client.wait(instance_id, "scheduled")
        assigned = sandbox.assignment(instance_id).spec
        assert (assigned.env, assigned.command, assigned.working_dir, assigned.user) == (
            {"A": "1"},
            ["a", "b"],
            "/w",
            "u",
        )
        assert [port.container for port in assigned.ports] == [80]
    sandbox.client.delete(f"/v1/instance-groups/{group['id']}")


def test_a_long_reason_is_truncated_in_events_only(client: Client, node: WireNode) -> None:
    made = client.create()
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync(instances=None).assignments
    message = "no " * 600
    node.sync(observed(assignment, "refused", reason={"code": "image_pull_failed", "message": message}))
    assert client.wait(made["id"], "failed")["reason"]["message"] == message
    event = client.items(f"/v1/instances/{made['id']}/events")[-1]
    assert event["data"]["reason"]["message"] == message[:500]
