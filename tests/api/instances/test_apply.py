"""Applying instances: PUT of all fields, by id and by name."""

from typing import Any

import pytest
from sqlalchemy import select

from mooring.db.tables import AuditEntry, Instance
from mooring_client.schemas.spec import InstanceSpec
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

IMAGE = "mooring-test/busybox:1"
NOWHERE = {"sandbox": "nowhere"}  # no node has this label: such an instance stays pending
# Every field of a request, none with its default.
FULL: dict[str, Any] = {
    "image": IMAGE, "command": ["sleep", "60"], "entrypoint": ["/bin/sh", "-c"], "working_dir": "/tmp",
    "user": "1000:1000", "env": {"A": "1", "B": "2"}, "tty": True, "stdin": True, "attach": True,
    "gpus": {"count": 2, "model": ["H100", "A100"], "min_memory_mib": 1000, "same_numa": True,
             "min_compute_capability": "8.0"},
    "cpus": 2, "memory_mib": 1024, "shm_mib": 64, "disk_mib": 1000,
    "ports": [{"container": 80}, {"container": 53, "protocol": "udp"}],
    "volumes": [{"volume": "of-apply", "path": "/data", "read_only": True}], "max_duration_s": 3600,
    "restart": "always", "on_capacity": "queue", "on_node_loss": "replace", "priority": 10,
    "preemptible": True, "on_preemption": "stop", "preemption_grace_s": 5, "node_selector": NOWHERE,
    "labels": {"team": "vision"},
}  # fmt: skip
CHANGEABLE = {"labels", "max_duration_s", "priority"}
# Another valid value of each field that is fixed, and the pointers to what then differs.
OTHERS: dict[str, tuple[Any, list[str]]] = {
    "image": ("mooring-test/busybox:2", ["/image"]),
    "command": (["sleep", "61"], ["/command"]),
    "entrypoint": (None, ["/entrypoint"]),
    "working_dir": ("/", ["/working_dir"]),
    "user": ("root", ["/user"]),
    "env": ({"A": "2", "C": "3"}, ["/env/A", "/env/B", "/env/C"]),
    "tty": (False, ["/tty"]),
    "stdin": (False, ["/stdin"]),
    "attach": (False, ["/attach"]),
    "gpus": ({"count": 1, "model": "H100"}, [
        "/gpus/count", "/gpus/model", "/gpus/min_memory_mib", "/gpus/min_compute_capability",
        "/gpus/same_numa",
    ]),
    "cpus": (3, ["/cpus"]),
    "memory_mib": (None, ["/memory_mib"]),
    "shm_mib": (65, ["/shm_mib"]),
    "disk_mib": (1001, ["/disk_mib"]),
    "ports": ([], ["/ports"]),
    "volumes": ([], ["/volumes"]),
    "restart": ("never", ["/restart"]),
    "on_capacity": ("fail", ["/on_capacity"]),
    "on_node_loss": ("keep", ["/on_node_loss"]),
    "preemptible": (False, ["/preemptible"]),
    "on_preemption": ("requeue", ["/on_preemption"]),
    "preemption_grace_s": (6, ["/preemption_grace_s"]),
    "node_selector": ({}, ["/node_selector/sandbox"]),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def volume_of_full(shared: Client) -> None:
    assert shared.post("/v1/volumes", json={"name": "of-apply"}).status_code == 201


def _by_name(name: str) -> str:
    return f"/v1/instances/by-name/{name}"


def _apply(client: Client, name: str, **fields: Any) -> Any:
    body = {"image": IMAGE, "node_selector": NOWHERE, **fields}
    answer = client.put(_by_name(name), json=body)
    assert answer.is_success, answer.text
    return answer


def _settled(client: Client, instance_id: str) -> dict[str, Any]:
    """The instance once the scheduler has set its reason: from then on only the test changes its version."""
    wait_until(lambda: (client.instance(instance_id)["reason"] or {}).get("code") != "queued")
    return client.instance(instance_id)


def _audited(service: RunningService, target_id: str) -> list[str]:
    with service.plane.database.read() as session:
        query = select(AuditEntry.action).where(AuditEntry.target_id == target_id).order_by(AuditEntry.seq)
        return list(session.scalars(query))


class TestUnchanged:
    def test_a_repeated_request_changes_nothing(self, shared_service: RunningService, shared: Client) -> None:
        created = _apply(shared, "twice", **FULL)
        made = created.json()
        assert created.status_code == 201
        assert created.headers["mooring-applied"] == "created"
        assert created.headers["location"] == f"/v1/instances/{made['id']}"
        before, seq = _settled(shared, made["id"]), shared_service.newest_seq
        same = {**FULL, "name": "twice", "project_id": made["project_id"]}
        again = shared.put(_by_name("twice"), json=same)
        assert (again.status_code, again.headers["mooring-applied"]) == (200, "unchanged")
        assert again.headers["etag"] == f'"{before["version"]}"'
        assert again.json() == before
        assert "location" not in again.headers
        assert shared_service.newest_seq == seq
        assert _audited(shared_service, made["id"]) == ["instance.apply"]

    def test_what_is_read_can_be_written_back(self, shared: Client) -> None:
        for number, fields in enumerate(({"image": IMAGE, "node_selector": NOWHERE}, FULL)):
            made = shared.post("/v1/instances", json={**fields, "name": f"read-{number}"}).json()
            shown = _settled(shared, made["id"])
            body = {field: shown[field] for field in (*InstanceSpec.model_fields, "name", "labels")}
            for path in (f"/v1/instances/{made['id']}", _by_name(f"read-{number}")):
                answer = shared.put(path, json={**body, "project_id": shown["project_id"]})
                assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "unchanged"), path
            assert shared.instance(made["id"])["version"] == shown["version"]

    def test_every_field_is_read_as_it_was_written(self, shared: Client) -> None:
        shown = _apply(shared, "as-written", **FULL).json()
        assert FULL.keys() == {*InstanceSpec.model_fields, "labels"}
        differ = [name for name in FULL if shown[name] != FULL[name]]
        # With the defaults of their parts.
        assert differ == ["gpus", "ports"]
        assert FULL["gpus"].items() <= shown["gpus"].items()
        assert [port["container"] for port in shown["ports"]] == [80, 53]

    def test_by_id_an_omitted_name_stays(self, shared: Client) -> None:
        made = shared.create(node_selector=NOWHERE)
        answer = shared.put(f"/v1/instances/{made['id']}", json={"image": IMAGE, "node_selector": NOWHERE})
        assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "unchanged")
        assert answer.json()["name"] == made["name"]

    def test_an_ended_instance_is_not_run_again(self, shared: Client) -> None:
        made = _apply(shared, "finished").json()
        shared.post(f"/v1/instances/{made['id']}/stop")
        ended = shared.wait(made["id"], "stopped")
        assert _apply(shared, "finished").headers["mooring-applied"] == "unchanged"
        assert shared.instance(made["id"]) == ended
        different = {"image": IMAGE, "node_selector": NOWHERE, "command": ["true"]}
        found = problem(shared.put(_by_name("finished"), json=different), 409, "requires_replacement")
        assert (found["id"], found["pointers"]) == (made["id"], ["/command"])
        shared.delete(f"/v1/instances/{made['id']}")
        assert shared.put(_by_name("finished"), json=different).status_code == 201

    def test_a_field_that_was_stored_by_another_release_is_no_difference(
        self, shared_service: RunningService, shared: Client
    ) -> None:
        made = _apply(shared, "older", priority=7).json()
        _settled(shared, made["id"])
        with shared_service.plane.database.write() as session:
            row = session.get_one(Instance, made["id"])
            stored = {name: value for name, value in row.spec.items() if name != "attach"}
            row.spec = {**stored, "of_a_newer_release": 1}
        assert _apply(shared, "older", priority=7).headers["mooring-applied"] == "unchanged"
        assert _apply(shared, "older", priority=8).headers["mooring-applied"] == "changed"


class TestChanged:
    def test_what_a_patch_can_change_is_changed(self, shared_service: RunningService, shared: Client) -> None:
        made = _apply(shared, "change-me", **FULL).json()
        version = _settled(shared, made["id"])["version"]
        changes: dict[str, Any] = {"labels": {"a": "b"}, "max_duration_s": None, "priority": 20}
        answer = _apply(shared, "change-me", **(FULL | changes))
        assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "changed")
        shown = answer.json()
        assert {name: shown[name] for name in changes} == changes
        assert shown["version"] > version
        assert _apply(shared, "change-me", **(FULL | changes)).headers["mooring-applied"] == "unchanged"
        assert _audited(shared_service, made["id"]) == ["instance.apply"] * 2

    def test_omitted_fields_have_their_defaults(self, shared: Client) -> None:
        _apply(shared, "defaults", labels={"a": "b"}, max_duration_s=60, priority=1)
        shown = _apply(shared, "defaults").json()
        assert (shown["labels"], shown["max_duration_s"], shown["priority"]) == ({}, None, 50)

    def test_by_id_the_name_can_be_changed(self, shared: Client) -> None:
        made = _apply(shared, "old-name").json()
        _apply(shared, "other-name")
        path, body = f"/v1/instances/{made['id']}", {"image": IMAGE, "node_selector": NOWHERE}
        problem(shared.put(path, json={**body, "name": "other-name"}), 409, "name_taken")
        assert shared.put(path, json={**body, "name": "new-name"}).json()["name"] == "new-name"
        assert _apply(shared, "old-name").status_code == 201

    def test_a_new_duration_counts_from_the_start(self, sandbox: Sandbox) -> None:
        selector = {"sandbox": sandbox.node.name}
        made = sandbox.running(name="runs-on", gpus={"count": 1})
        body = {"image": IMAGE, "node_selector": selector, "gpus": {"count": 1}, "max_duration_s": 3600}
        answer = sandbox.client.put(_by_name("runs-on"), json=body)
        assert answer.headers["mooring-applied"] == "changed"
        assert answer.json()["expires_at"] > answer.json()["started_at"]
        assert answer.json()["id"] == made.instance_id

    @pytest.mark.parametrize("field", sorted(FULL.keys() - CHANGEABLE))
    def test_another_field_requires_a_new_instance(self, shared: Client, field: str) -> None:
        name = f"fixed-{field.replace('_', '-')}"
        made = _settled(shared, _apply(shared, name, **FULL).json()["id"])
        value, pointers = OTHERS[field]
        body = {**FULL, field: value, "priority": 20, "labels": {}}
        found = problem(shared.put(_by_name(name), json=body), 409, "requires_replacement")
        assert (found["pointers"], found["id"], found["retryable"]) == (pointers, made["id"], False)
        problem(shared.put(f"/v1/instances/{made['id']}", json=body), 409, "requires_replacement")
        assert shared.instance(made["id"]) == made

    def test_the_project_cannot_be_changed(self, shared: Client) -> None:
        made = _apply(shared, "stays").json()
        other = shared.post("/v1/projects", json={"name": "elsewhere"}).json()["id"]
        body = {"image": IMAGE, "node_selector": NOWHERE, "project_id": other}
        found = problem(shared.put(f"/v1/instances/{made['id']}", json=body), 409, "requires_replacement")
        assert found["pointers"] == ["/project_id"]
        assert shared.put(_by_name("stays"), json=body).status_code == 201  # the other project has none

    def test_values_of_env_are_not_revealed(self, shared: Client) -> None:
        _apply(shared, "secretive", env={"TOKEN": "hunter2"})
        body = {"image": IMAGE, "node_selector": NOWHERE, "env": {"TOKEN": "hunter3"}}
        for answer in (
            shared.put(_by_name("secretive"), json=body),
            shared.put(_by_name("secretive"), json=body, params={"dry_run": True}),
        ):
            assert "/env/TOKEN" in answer.text
            assert "hunter" not in answer.text

    def test_a_member_of_a_group_is_changed_with_its_group(self, shared: Client) -> None:
        template = {"image": IMAGE, "node_selector": NOWHERE}
        shared.post("/v1/instance-groups", json={"name": "gang", "count": 1, "template": template})
        assert _apply(shared, "gang-0").headers["mooring-applied"] == "unchanged"
        assert _apply(shared, "gang-0", labels={"a": "b"}).headers["mooring-applied"] == "changed"
        for fields in ({"priority": 7}, {"command": ["true"]}):
            answer = shared.put(_by_name("gang-0"), json={**template, "labels": {"a": "b"}, **fields})
            problem(answer, 409, "member_of_group")


class TestBeingDeleted:
    def test_the_name_is_free_once_the_instance_is_gone(self, sandbox: Sandbox) -> None:
        client, selector = sandbox.client, {"sandbox": sandbox.node.name}
        made = sandbox.running(name="leaving")
        client.delete(f"/v1/instances/{made.instance_id}")
        body = {"image": IMAGE, "node_selector": selector, "priority": 7}
        found = problem(client.put(_by_name("leaving"), json=body), 409, "being_deleted")
        assert (found["id"], found["retryable"]) == (made.instance_id, True)
        problem(client.put(f"/v1/instances/{made.instance_id}", json=body), 409, "being_deleted")
        path = f"/v1/instances/{made.instance_id}"
        wait_until(lambda: sandbox.sync() and client.get(path).status_code == 404)
        answer = client.put(_by_name("leaving"), json=body)
        assert answer.status_code == 201
        sandbox.created_ids.append(answer.json()["id"])


class TestIfMatch:
    def test_a_stale_version_is_rejected_even_if_nothing_differs(self, shared: Client) -> None:
        made = _settled(shared, _apply(shared, "matched").json()["id"])
        body = {"image": IMAGE, "node_selector": NOWHERE}
        for path in (_by_name("matched"), f"/v1/instances/{made['id']}"):
            problem(shared.put(path, json=body, headers={"If-Match": '"999"'}), 412, "precondition_failed")
        answer = shared.put(
            _by_name("matched"), json={**body, "priority": 9}, headers={"If-Match": f'"{made["version"]}"'}
        )
        assert answer.json()["priority"] == 9
        stale = {"If-Match": f'"{made["version"]}"'}
        problem(shared.put(_by_name("matched"), json=body, headers=stale), 412, "precondition_failed")
        assert shared.put(_by_name("matched"), json=body, headers={"If-Match": "*"}).status_code == 200

    @pytest.mark.parametrize("etag", ['"1"', "*"])
    def test_nothing_is_created_that_should_exist(self, shared: Client, etag: str) -> None:
        body = {"image": IMAGE, "node_selector": NOWHERE}
        answer = shared.put(_by_name("never-was"), json=body, headers={"If-Match": etag})
        problem(answer, 412, "precondition_failed")
        assert shared.items("/v1/instances", name="never-was") == []


class TestRejected:
    def test_the_body_may_not_name_another_instance(self, shared: Client) -> None:
        found = problem(
            shared.put(_by_name("here"), json={"image": IMAGE, "name": "there"}), 422, "validation_failed"
        )
        assert [each["pointer"] for each in found["errors"]] == ["/name"]

    @pytest.mark.parametrize("name", ["Upper", "-a", "a" * 64, "a_b", "%00", "ö"])
    def test_the_name_must_be_valid(self, shared: Client, name: str) -> None:
        answer = shared.put(_by_name(name), json={"image": IMAGE})
        assert answer.status_code in {400, 422}, answer.text

    @pytest.mark.parametrize(
        "body", [{}, {"image": None}, {"image": IMAGE, "x": 1}, {"image": IMAGE, "gpus": {"count": -1}}, []]
    )
    def test_an_invalid_body_creates_nothing(self, shared: Client, body: Any) -> None:
        for path in (_by_name("invalid"), "/v1/instances/ins_none"):
            assert shared.put(path, json=body).status_code == 422
        assert shared.items("/v1/instances", name="invalid") == []

    def test_an_unknown_instance_is_not_created_by_its_id(self, shared: Client) -> None:
        problem(shared.put("/v1/instances/ins_none", json={"image": IMAGE}), 404, "not_found")

    def test_the_rules_of_a_create_hold(self, shared: Client) -> None:
        project = shared.post("/v1/projects", json={"name": "strict-rules"}).json()["id"]
        limits = {"quotas": {"gpus": 1}, "allowed_images": ["docker.io/mooring-test/*"]}
        assert shared.patch(f"/v1/projects/{project}", json=limits).status_code == 200
        body = {"image": IMAGE, "project_id": project, "gpus": {"count": 2}}
        for params in ({}, {"dry_run": True}):
            problem(shared.put(_by_name("big"), json=body, params=params), 403, "quota_exceeded")
            other = {"image": "elsewhere.example/x", "project_id": project}
            problem(shared.put(_by_name("big"), json=other, params=params), 403, "image_not_allowed")
        assert shared.items("/v1/instances", project_id=project) == []

    def test_with_on_capacity_fail_it_starts_now_or_is_not_created(self, sandbox: Sandbox) -> None:
        client, selector = sandbox.client, {"sandbox": sandbox.node.name}
        body = {"image": IMAGE, "node_selector": selector, "on_capacity": "fail", "gpus": {"count": 8}}
        answer = client.put(_by_name("at-once"), json=body)
        assert (answer.status_code, answer.json()["state"]) == (201, "scheduled")
        sandbox.created_ids.append(answer.json()["id"])
        problem(client.put(_by_name("at-once-2"), json=body), 409, "insufficient_capacity")
        problem(
            client.put(_by_name("at-once-2"), json=body, params={"dry_run": True}),
            409,
            "insufficient_capacity",
        )
        assert client.items("/v1/instances", name="at-once-2") == []
        assert client.put(_by_name("at-once"), json=body).headers["mooring-applied"] == "unchanged"


class TestConcurrent:
    def test_of_16_requests_exactly_one_creates(self, shared: Client) -> None:
        body = {"image": IMAGE, "node_selector": NOWHERE}
        answers = run_concurrently(16, lambda _n: shared.put(_by_name("contended"), json=body))
        assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
        assert {answer.headers["mooring-applied"] for answer in answers} == {"created", "unchanged"}
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert len(shared.items("/v1/instances", name="contended")) == 1

    def test_different_requests_are_applied_one_after_the_other(self, shared: Client) -> None:
        def act(number: int) -> Any:
            labels = {"a": str(number), "b": str(number)}
            body = {"image": IMAGE, "node_selector": NOWHERE, "priority": number, "labels": labels}
            return shared.put(_by_name("mixed"), json=body)

        answers = run_concurrently(12, act)
        assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
        shown = shared.items("/v1/instances", name="mixed")
        assert len(shown) == 1
        number = str(shown[0]["priority"])
        assert shown[0]["labels"] == {"a": number, "b": number}

    def test_a_post_of_the_same_name_wins_or_loses(self, shared: Client) -> None:
        body = {"image": IMAGE, "node_selector": NOWHERE}

        def act(number: int) -> Any:
            if number % 2:
                return shared.put(_by_name("posted"), json=body)
            return shared.post("/v1/instances", json={**body, "name": "posted"})

        answers = run_concurrently(8, act)
        assert sum(answer.status_code == 201 for answer in answers) == 1
        assert {answer.status_code for answer in answers[1::2]} <= {200, 201}
        assert {answer.status_code for answer in answers[::2]} <= {201, 409}

    def test_applies_and_deletes_leave_at_most_one(self, shared: Client) -> None:
        body = {"image": IMAGE, "node_selector": NOWHERE}

        def act(number: int) -> int:
            if number % 3:
                return shared.put(_by_name("flapping"), json={**body, "priority": number}).status_code
            for found in shared.items("/v1/instances", name="flapping"):
                return shared.delete(f"/v1/instances/{found['id']}").status_code
            return 404

        assert set(run_concurrently(15, act)) <= {200, 201, 202, 404}
        assert len(shared.items("/v1/instances", name="flapping")) <= 1
        assert shared.put(_by_name("flapping"), json=body).status_code in {200, 201}


class TestDryRun:
    def _plan(self, client: Client, name: str, **fields: Any) -> dict[str, Any]:
        body = {"image": IMAGE, "node_selector": NOWHERE, **fields}
        answer = client.put(_by_name(name), json=body, params={"dry_run": True})
        assert answer.status_code == 200, answer.text
        assert "mooring-applied" not in answer.headers
        return dict(answer.json())

    def test_it_shows_a_create_and_creates_nothing(
        self, shared_service: RunningService, shared: Client
    ) -> None:
        seq = shared_service.newest_seq
        planned = self._plan(shared, "planned")
        assert planned == {"outcome": "created", "id": None, "changes": []}
        assert shared.items("/v1/instances", name="planned") == []
        assert shared_service.newest_seq == seq

    def test_it_shows_each_change_and_changes_nothing(
        self, shared_service: RunningService, shared: Client
    ) -> None:
        made = _apply(shared, "plan-a-change", labels={"a": "1"}, env={"A": "1"}).json()
        before, seq = _settled(shared, made["id"]), shared_service.newest_seq
        assert self._plan(shared, "plan-a-change", labels={"a": "1"}, env={"A": "1"}) == {
            "outcome": "unchanged", "id": made["id"], "changes": [],
        }  # fmt: skip
        plan = self._plan(shared, "plan-a-change", priority=7, labels={"b": "2"}, env={"A": "1"})
        assert plan["outcome"] == "changed"
        assert plan["changes"] == [
            {"pointer": "/labels/a", "before": '"1"', "after": None, "fixed": False},
            {"pointer": "/labels/b", "before": None, "after": '"2"', "fixed": False},
            {"pointer": "/priority", "before": "50", "after": "7", "fixed": False},
        ]
        plan = self._plan(shared, "plan-a-change", labels={"a": "1"}, env={"A": "2"}, command=["x"])
        assert plan["outcome"] == "requires_replacement"
        assert plan["changes"] == [
            {"pointer": "/command", "before": "null", "after": '["x"]', "fixed": True},
            {"pointer": "/env/A", "before": None, "after": None, "fixed": True},
        ]
        assert shared.instance(made["id"]) == before
        assert shared_service.newest_seq == seq
        assert _audited(shared_service, made["id"]) == ["instance.apply"]

    def test_a_place_that_it_finds_stays_free(self, sandbox: Sandbox) -> None:
        selector = {"sandbox": sandbox.node.name}
        fields: dict[str, Any] = {"node_selector": selector, "on_capacity": "fail", "gpus": {"count": 8}}
        for _ in range(2):
            assert self._plan(sandbox.client, "would-fit", **fields)["outcome"] == "created"
        sandbox.running(gpus={"count": 8})


def test_a_viewer_may_not_even_plan(shared: Client) -> None:
    project = shared.post("/v1/projects", json={"name": "viewed"}).json()["id"]
    key = shared.post("/v1/api-keys", json={"name": "v", "project_id": project, "role": "viewer"}).json()
    with Client(str(shared.base_url), key=key["key"]) as viewer:
        for params in ({}, {"dry_run": True}):
            answer = viewer.put(_by_name("hers"), json={"image": IMAGE}, params=params)
            problem(answer, 403, "forbidden")


def test_the_callers_only_project_is_the_default(shared: Client) -> None:
    project = shared.post("/v1/projects", json={"name": "only-one"}).json()["id"]
    key = shared.post("/v1/api-keys", json={"name": "m", "project_id": project, "role": "member"}).json()
    _apply(shared, "same-name")
    with Client(str(shared.base_url), key=key["key"]) as member:
        answer = _apply(member, "same-name")
        assert (answer.status_code, answer.json()["project_id"]) == (201, project)
        hidden = {"image": IMAGE, "project_id": "prj_none"}
        problem(member.put(_by_name("same-name"), json=hidden), 404, "not_found")
