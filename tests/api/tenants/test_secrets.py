"""Secrets: only containers get their values."""

import base64
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import event, select, text, update

from mooring.agent.sync.specs import Specs
from mooring.control.nodes import nodes
from mooring.db.tables import Base, Registry, Secret
from mooring.schemas.agent import Assignment, StartSecrets, SyncAnswer
from mooring_client.schemas.projects import Role
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed, simulated_node
from tests.problems import problem
from tests.service import Client, RunningService


class Tenant(AbstractContextManager["Tenant"]):
    """A project with a key for each role."""

    def __init__(self, admin: Client, name: str) -> None:
        self.id: str = admin.post("/v1/projects", json={"name": name}).json()["id"]
        self.owner, self.member, self.viewer = (
            self._client(admin, role) for role in (Role.OWNER, Role.MEMBER, Role.VIEWER)
        )

    def _client(self, admin: Client, role: Role) -> Client:
        body = {"name": "test", "project_id": self.id, "role": role}
        return Client(str(admin.base_url), admin.post("/v1/api-keys", json=body).json()["key"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in (self.owner, self.member, self.viewer):
            client.close()

    def create_secret(self, name: str, value: str) -> str:
        """Create a secret; return its path."""
        answer = self.member.post("/v1/secrets", json={"name": name, "value": value})
        assert answer.status_code == 201, answer.text
        return str(answer.headers["location"])


@pytest.fixture
def tenant(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"secrets-{uuid4().hex[:8]}") as made:
        yield made


def _env_with_secrets(*names: str) -> dict[str, dict[str, str]]:
    """An environment with one variable per secret."""
    return {f"V{number}": {"secret": name} for number, name in enumerate(names)}


def test_a_value_is_stored_and_never_returned(tenant: Tenant) -> None:
    answer = tenant.member.post("/v1/secrets", json={"name": "hf-token", "value": "swordfish"})
    made = answer.json()
    path = answer.headers["location"]
    assert (answer.status_code, path) == (201, f"/v1/secrets/{made['id']}")
    assert made.keys() == {"id", "name", "project_id", "created_at"}
    assert (made["name"], made["project_id"]) == ("hf-token", tenant.id)
    assert tenant.viewer.get(path).json() == made
    assert tenant.viewer.items("/v1/secrets") == tenant.viewer.items("/v1/secrets", name="hf-token") == [made]
    assert tenant.viewer.items("/v1/secrets", name="other") == []
    assert tenant.member.put(path, json={"value": "marlin"}).json() == made
    assert tenant.member.delete(path).status_code == 204
    problem(tenant.member.get(path), 404, "not_found")
    problem(tenant.member.put(path, json={"value": "x"}), 404, "not_found")
    entries = tenant.owner.items("/v1/audit-log")[:3]
    assert [entry["action"] for entry in entries] == ["secret.delete", "secret.replace", "secret.create"]
    assert {entry["target_id"] for entry in entries} == {made["id"]}
    assert "swordfish" not in str(entries)
    assert "marlin" not in str(entries)


def test_members_create_secrets_viewers_see_names_and_others_see_nothing(
    shared: Client, tenant: Tenant
) -> None:
    path = tenant.create_secret("shared", "swordfish")
    problem(tenant.viewer.post("/v1/secrets", json={"name": "x", "value": "y"}), 403, "forbidden")
    problem(tenant.viewer.put(path, json={"value": "y"}), 403, "forbidden")
    problem(tenant.viewer.delete(path), 403, "forbidden")
    with Tenant(shared, f"others-{uuid4().hex[:8]}") as other:
        body = {"name": "x", "value": "y", "project_id": tenant.id}
        for answer in (
            other.owner.get(path),
            other.owner.put(path, json={"value": "y"}),
            other.owner.delete(path),
            other.owner.post("/v1/secrets", json=body),
        ):
            problem(answer, 404, "not_found")
        assert other.owner.items("/v1/secrets") == []
        other.create_secret("shared", "of another project")
        # A secret's name is resolved in the instance's project.
        naming = {"image": "busybox", "env": _env_with_secrets("shared"), "project_id": tenant.id}
        problem(other.member.post("/v1/instances", json=naming), 404, "not_found")
    assert shared.items("/v1/secrets", project_id=tenant.id)[0]["name"] == "shared"


def test_names_are_unique_in_a_project(tenant: Tenant) -> None:
    body = {"name": "token", "value": "swordfish"}
    answers = run_concurrently(8, lambda _: tenant.member.post("/v1/secrets", json=body))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 7
    for answer in answers:
        if answer.status_code == 409:
            assert problem(answer, 409, "name_taken")["name"] == "token"
    (secret,) = tenant.member.items("/v1/secrets")
    deleted = run_concurrently(4, lambda _: tenant.member.delete(f"/v1/secrets/{secret['id']}"))
    assert sorted(answer.status_code for answer in deleted) == [204, 404, 404, 404]


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "value": ["swordfish"]},
        {"name": "x", "value": {"swordfish": 1}},
        {"name": "x", "value": "swordfish\0"},
        {"name": "x", "value": "swordfish" * 5000},
        {"name": "no good name", "value": "swordfish"},
        {"name": "x", "valu": "swordfish"},
        {"name": "x", "value": "swordfish", "more": 1},
        {"name": "x", "value": ""},
        {"value": 7, "name": "swordfish"},
        "swordfish",
        ["swordfish"],
    ],
)
def test_a_rejection_does_not_contain_the_sent_values(tenant: Tenant, body: object) -> None:
    path = tenant.create_secret("kept", "y")
    for answer in (tenant.member.post("/v1/secrets", json=body), tenant.member.put(path, json=body)):
        assert answer.status_code in {400, 422}
        assert answer.headers["content-type"] == "application/problem+json"
        assert "swordfish" not in answer.text


def test_a_value_may_be_long_and_any_unicode(sandbox: Sandbox, tenant: Tenant) -> None:
    for name, value in (("long", "x" * 32_768), ("unicode", "žluťoučký kůň 🐎\n\ttail")):
        tenant.create_secret(name, value)
        placed = sandbox.placed(project_id=tenant.id, env=_env_with_secrets(name))
        assert sandbox.node.start_secrets(placed).secrets == {"V0": value}


def test_values_are_handed_out_only_to_an_attempt_that_may_start(sandbox: Sandbox, tenant: Tenant) -> None:
    path = tenant.create_secret("token", "swordfish")
    env = {"TOKEN": {"secret": "token"}, "AGAIN": {"secret": "token"}, "PLAIN": "seen by all"}
    first = sandbox.placed(project_id=tenant.id, env=env)
    assert first.asks_for_secrets
    assert sandbox.node.start_secrets(first).secrets == {"TOKEN": "swordfish", "AGAIN": "swordfish"}
    assert sandbox.client.instance(first.instance_id)["env"] == env
    sandbox.sync(observed(first, "starting"))
    assert sandbox.node.start_secrets(first).secrets == {"TOKEN": "swordfish", "AGAIN": "swordfish"}
    sandbox.sync(observed(first, "running"))
    _require_no_secrets(sandbox, first)
    tenant.member.put(path, json={"value": "marlin"})
    _require_no_secrets(sandbox, first)  # the container keeps the value from its start

    instance_path = f"/v1/instances/{first.instance_id}"
    tenant.member.post(f"{instance_path}/restart")
    second = sandbox.assignment(first.instance_id)
    _require_no_secrets(sandbox, first)
    assert sandbox.node.start_secrets(second).secrets == {"TOKEN": "marlin", "AGAIN": "marlin"}
    sandbox.sync(observed(second, "running"))
    tenant.member.post(f"{instance_path}/stop")
    _require_no_secrets(sandbox, second)
    sandbox.sync(observed(second, "exited", exit_code=0))
    _require_no_secrets(sandbox, second)
    tenant.member.post(f"{instance_path}/start")
    sandbox.client.wait(first.instance_id, "scheduled")
    third = sandbox.assignment(first.instance_id)
    assert sandbox.node.start_secrets(third).secrets == {"TOKEN": "marlin", "AGAIN": "marlin"}
    tenant.member.post(f"{instance_path}/stop")
    _require_no_secrets(sandbox, third)


def _require_no_secrets(sandbox: Sandbox, assignment: Assignment) -> None:
    problem(sandbox.node.post_start_secrets(assignment), 404, "not_found")


def test_a_node_that_lost_docker_before_the_start_gets_secrets_again(
    sandbox: Sandbox, tenant: Tenant
) -> None:
    """The instance may still start when Docker is back, and then needs its secrets."""
    tenant.create_secret("token", "swordfish")
    placed = sandbox.placed(project_id=tenant.id, env=_env_with_secrets("token"))
    with sandbox.service.plane.database.write() as session:
        nodes.mark_unreachable(session, sandbox.node.id)
    assert sandbox.client.instance(placed.instance_id)["state"] == "unreachable"
    docker_problem = {"code": "docker_unavailable", "message": "Docker does not answer"}
    (assignment,) = sandbox.sync(instances=None, problem=docker_problem).assignments
    assert sandbox.client.instance(placed.instance_id)["state"] == "unreachable"
    assert (assignment.want, assignment.may_start) == ("running", True)
    assert sandbox.node.start_secrets(assignment).secrets == {"V0": "swordfish"}


def test_a_request_with_an_unknown_secret_is_rejected(sandbox: Sandbox, tenant: Tenant) -> None:
    path = tenant.create_secret("there", "swordfish")
    body = {"image": "busybox", "env": {"A": {"secret": "there"}, "B": {"secret": "gone"}}}
    for query in ("", "?dry_run=true"):
        refused = problem(tenant.member.post(f"/v1/instances{query}", json=body), 422, "unknown_secret")
        assert [(item["pointer"], item["code"]) for item in refused["errors"]] == [
            ("/env/B", "unknown_secret")
        ]
        assert "gone" in refused["detail"]
    assert tenant.member.items("/v1/instances") == []

    running = sandbox.placed(project_id=tenant.id, env=_env_with_secrets("there"))
    sandbox.sync(observed(running, "running"))
    tenant.member.delete(path)
    instance_path = f"/v1/instances/{running.instance_id}"
    problem(tenant.member.post(f"{instance_path}/restart"), 422, "unknown_secret")
    assert sandbox.client.instance(running.instance_id)["state"] == "running"
    tenant.member.post(f"{instance_path}/stop")
    sandbox.sync(observed(running, "exited", exit_code=0))
    refused = problem(tenant.member.post(f"{instance_path}/start"), 422, "unknown_secret")
    assert refused["errors"][0]["pointer"] == "/env/V0"
    assert sandbox.client.instance(running.instance_id)["state"] == "stopped"
    tenant.create_secret("there", "again")
    assert tenant.member.post(f"{instance_path}/start").status_code == 202


def test_a_name_refers_to_the_secret_of_the_instances_project(sandbox: Sandbox, tenant: Tenant) -> None:
    tenant.create_secret("same", "swordfish")
    tenant.create_secret("only-here", "swordfish")
    with Tenant(sandbox.client, f"others-{uuid4().hex[:8]}") as other:
        other.create_secret("same", "marlin")
        own = sandbox.placed(project_id=tenant.id, env=_env_with_secrets("same"))
        others = sandbox.placed(project_id=other.id, env=_env_with_secrets("same"))
        assert sandbox.node.start_secrets(own).secrets == {"V0": "swordfish"}
        assert sandbox.node.start_secrets(others).secrets == {"V0": "marlin"}
        body = {"image": "busybox", "env": _env_with_secrets("only-here")}
        problem(other.member.post("/v1/instances", json=body), 422, "unknown_secret")


def test_a_secret_deleted_before_the_start_fails_the_instance(
    client: Client, service: RunningService, tmp_path: Path
) -> None:
    with Tenant(client, "late") as tenant:
        path = tenant.create_secret("token", "swordfish")
        made = tenant.member.create(env=_env_with_secrets("token"))
        tenant.member.delete(path)
        with simulated_node(client, tmp_path / "node", "gpu-1"):
            failed = client.wait(made["id"], "failed")
            assert failed["reason"]["code"] == "secret_unavailable"
            assert "token" in failed["reason"]["message"]
            tenant.create_secret("token", "swordfish")
            tenant.member.post(f"/v1/instances/{made['id']}/start")
            client.wait(made["id"], "running")


def test_the_total_size_of_handed_out_values_is_limited(sandbox: Sandbox, tenant: Tenant) -> None:
    path = tenant.create_secret("large", "x" * 32_768)
    many = _env_with_secrets(*["large"] * 100)
    refused = tenant.member.post("/v1/instances", json={"image": "busybox", "env": many})
    problem(refused, 422, "secrets_too_large")
    tenant.member.put(path, json={"value": "x"})
    placed = sandbox.placed(project_id=tenant.id, env=many)
    assert len(sandbox.node.start_secrets(placed).secrets) == 100
    tenant.member.put(path, json={"value": "x" * 32_768})  # larger than at the create
    secrets = sandbox.node.start_secrets(placed).secrets
    assert sum(map(len, secrets.values())) <= 1024 * 1024


def test_a_damaged_secret_does_not_block_the_others(
    sandbox: Sandbox, tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.create_secret("good", "swordfish")
    damaged_id = tenant.create_secret("bad", "marlin").rpartition("/")[2]
    registry_id = tenant.owner.post("/v1/registries", json=_credentials()).json()["id"]
    image = "registry.example/x:1"
    placed = sandbox.placed(project_id=tenant.id, image=image, env=_env_with_secrets("good", "bad"))
    assert sandbox.node.start_secrets(placed).registry is not None
    with sandbox.service.plane.database.write() as session:
        session.execute(update(Secret).where(Secret.id == damaged_id).values(sealed_value=b"no token"))
        session.execute(
            update(Registry).where(Registry.id == registry_id).values(sealed_password=b"no token")
        )
    start_data = sandbox.node.start_secrets(placed)
    assert (start_data.secrets, start_data.registry) == ({"V0": "swordfish"}, None)
    assert "bad" in caplog.text
    assert "swordfish" not in caplog.text


def test_a_report_does_not_query_secrets(sandbox: Sandbox, tenant: Tenant) -> None:
    """Reports are frequent and must stay cheap."""
    tenant.create_secret("a", "swordfish")
    tenant.create_secret("b", "marlin")
    fields: dict[str, Any] = {"project_id": tenant.id, "image": "registry.example/x:1"}
    placed = [
        sandbox.placed(env=_env_with_secrets("a", "b"), **fields),
        sandbox.placed(env=_env_with_secrets("b"), **fields),
        sandbox.placed(**fields),
    ]
    sandbox.node.specs = Specs()  # as of an agent that has just started
    with _statements(sandbox.service) as statements:
        reply = sandbox.sync(instances=None)
    assert [item.asks_for_secrets for item in reply.assignments] == [True, True, False]
    assert not any(" secrets" in statement for statement in statements)
    assert sum(" registries" in statement for statement in statements) == 1
    assert sum(" projects" in statement for statement in statements) == 1
    running = [observed(item, "running") for item in placed]
    sandbox.sync(*running)
    with _statements(sandbox.service) as statements:
        sandbox.sync(*running)
    assert not any(" secrets" in statement or " registries" in statement for statement in statements)


@contextmanager
def _statements(service: RunningService) -> Iterator[list[str]]:
    """The SQL statements within the block, on any connection."""
    engine, statements = service.plane.database.engine, list[str]()

    def record(*arguments: Any) -> None:
        statements.append(arguments[2].replace("\n", " "))

    event.listen(engine, "before_cursor_execute", record)
    yield statements
    event.remove(engine, "before_cursor_execute", record)


# --- canary values, searched in everything that the service sends or stores

MARK = "CANARY7f3c9a51d2e8"
PLAIN = "plain0c4bd6e7a1f9"  # an ordinary variable: shows that the search works
VALUE, REPLACED = f"{MARK}-value", f"{MARK}-replaced"
PASSWORD, NEW_PASSWORD = f"{MARK}-password", f"{MARK}-new-password"


def _forms(mark: str) -> list[bytes]:
    """Encodings of the mark: plain, hexadecimal, and base64 at any offset."""
    raw = mark.encode()
    shifted = [base64.b64encode(b"x" * shift + raw)[4:-4] for shift in range(3)]
    return [raw, raw.hex().encode(), *shifted]


def _contains(content: bytes, mark: str = MARK) -> bool:
    return any(form in content for form in _forms(mark))


class RecordingClient(Client):
    """A client that records all answers, headers and bodies."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.answers: list[bytes] = []

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        answer = super().send(request, **options)
        if not options.get("stream"):
            self.record(answer, answer.content)
        return answer

    def record(self, answer: httpx.Response, content: bytes) -> None:
        self.answers.append(repr(answer.headers.multi_items()).encode() + content)

    def expect(self, status: int, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = self.request(method, path, **request)
        assert answer.status_code == status, answer.text
        return dict(answer.json()) if answer.content else {}


@pytest.fixture
def recording_owner(service: RunningService, client: Client) -> Iterator[RecordingClient]:
    """An owner's client in a new project."""
    with Tenant(client, "canary") as tenant, RecordingClient(service.url, _key_of(tenant.owner)) as made:
        yield made


@pytest.fixture
def admin(service: RunningService, client: Client) -> Iterator[RecordingClient]:
    with RecordingClient(service.url, _key_of(client)) as made:
        yield made


def _key_of(client: Client) -> str:
    return client.headers["authorization"].removeprefix("Bearer ")


def test_secret_values_appear_only_in_the_start_data(
    service: RunningService,
    recording_owner: RecordingClient,
    admin: RecordingClient,
    node: WireNode,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = recording_owner.expect(201, "POST", "/v1/secrets", json={"name": "token", "value": VALUE})
    registry = recording_owner.expect(201, "POST", "/v1/registries", json=_credentials())
    _send_rejected_requests(
        recording_owner, f"/v1/secrets/{secret['id']}", f"/v1/registries/{registry['id']}"
    )

    env = {"TOKEN": {"secret": "token"}, "PLAIN": PLAIN}
    made = recording_owner.create(image="registry.example/x:1", env=env, labels={"a": "b"}, gpus={"count": 1})
    instance_path = f"/v1/instances/{made['id']}"
    recording_owner.wait(made["id"], "scheduled")
    first = _assignment_with_secrets(node, VALUE, PASSWORD)
    _read_everything(admin, recording_owner, made["id"], secret["id"], registry["id"], first.gpu_uuids[0])
    _require_no_secret_in_answer(node, observed(first, "running"))
    recording_owner.expect(200, "PUT", f"/v1/secrets/{secret['id']}", json={"value": REPLACED})
    recording_owner.expect(200, "PUT", f"/v1/registries/{registry['id']}", json={"password": NEW_PASSWORD})
    _require_no_secret_in_answer(node, observed(first, "running"))
    recording_owner.expect(202, "POST", f"{instance_path}/restart")
    second = _assignment_with_secrets(node, REPLACED, NEW_PASSWORD)
    _require_no_secret_in_answer(node, observed(second, "running"))
    _read_everything(admin, recording_owner, made["id"], secret["id"], registry["id"], first.gpu_uuids[0])
    recording_owner.expect(202, "POST", f"{instance_path}/stop")
    _require_no_secret_in_answer(node, observed(second, "running"))
    _require_no_secret_in_answer(node, observed(second, "exited", exit_code=0))
    recording_owner.expect(204, "DELETE", f"/v1/secrets/{secret['id']}")
    recording_owner.expect(422, "POST", f"{instance_path}/start")
    recording_owner.expect(204, "DELETE", f"/v1/registries/{registry['id']}")
    recording_owner.expect(202, "DELETE", instance_path)
    _require_no_secret_in_answer(node)
    # This secret is not deleted, so that `_require_encrypted` finds it.
    recording_owner.expect(201, "POST", "/v1/secrets", json={"name": "token", "value": VALUE})
    recording_owner.expect(201, "POST", "/v1/registries", json=_credentials())
    _read_everything(admin, recording_owner, made["id"], secret["id"], registry["id"], first.gpu_uuids[0])

    assert len(recording_owner.answers) + len(admin.answers) > 60
    assert any(_contains(answer, PLAIN) for answer in recording_owner.answers)
    assert not [answer for answer in recording_owner.answers + admin.answers if _contains(answer)]
    assert not _contains(caplog.text.encode())
    stored = _stored_bytes(service, tmp_path)
    assert _contains(stored, PLAIN)
    assert not _contains(stored)
    _require_encrypted(service)


def _credentials(**fields: Any) -> dict[str, Any]:
    return {"server": "registry.example", "username": "ci", "password": PASSWORD, **fields}


def _send_rejected_requests(client: RecordingClient, secret: str, registry: str) -> None:
    """Send repeated and rejected requests of every kind with secret values in the body."""
    good = {"name": "again", "value": VALUE}
    key = {"Idempotency-Key": "the-same"}
    for _ in range(2):
        client.expect(201, "POST", "/v1/secrets", json=good, headers=key)
    reused = client.post("/v1/secrets", json={**good, "value": REPLACED}, headers=key)
    problem(reused, 422, "idempotency_key_reused")
    credentials = _credentials(server="other.example")
    for _ in range(2):
        client.expect(201, "POST", "/v1/registries", json=credentials, headers={"Idempotency-Key": "another"})
    problem(client.post("/v1/secrets", json=good), 409, "name_taken")
    problem(client.post("/v1/registries", json=_credentials()), 409, "name_taken")
    for wrong in ([VALUE], {"a": VALUE}, f"{VALUE}\0", VALUE * 2000):
        for path, method, body in (
            ("/v1/secrets", "POST", {**good, "value": wrong}),
            (secret, "PUT", {"value": wrong}),
            ("/v1/registries", "POST", _credentials(password=wrong)),
            (registry, "PUT", {"password": wrong}),
        ):
            assert client.request(method, path, json=body).status_code in {400, 422}
    for broken in (f'{{"name": "x", "value": "{VALUE}', f'{{"value": "{VALUE}\x01"}}', f'"{VALUE}"'):
        for path in ("/v1/secrets", "/v1/registries"):
            answer = client.post(path, content=broken, headers={"Content-Type": "application/json"})
            assert answer.status_code in {400, 422}
    problem(client.post("/v1/secrets", content=VALUE, headers={"Content-Type": "text/plain"}), 415)
    problem(client.put("/v1/secrets/none", json={"value": VALUE}), 404)
    problem(client.post("/v1/secrets", json={**good, "project_id": "prj_none"}), 404)
    problem(client.patch(secret, json={"value": VALUE}), 405)


def _assignment_with_secrets(node: WireNode, value: str, password: str) -> Assignment:
    """The node's assignment. Fails unless the start data has each value once, and the answer has none."""
    answer = node.post_sync(instances=None, specs=None)
    reply = SyncAnswer.model_validate_json(answer.content)
    node.generation = reply.generation
    (assignment,) = reply.assignments
    assert (assignment.want, assignment.may_start) == ("running", True)
    assert answer.text.count(MARK) == 0
    handed = node.post_start_secrets(assignment)
    start_data = StartSecrets.model_validate_json(handed.content)
    assert start_data.secrets == {"TOKEN": value}
    assert start_data.registry is not None
    assert (start_data.registry.server, start_data.registry.password) == ("registry.example", password)
    assert handed.text.count(MARK) == 2
    assert MARK not in repr(start_data)
    return assignment


def _require_no_secret_in_answer(node: WireNode, *reported: Any) -> None:
    """Send a report; fail if its answer contains a secret."""
    answer = node.post_sync(*reported)
    assert answer.status_code == 200, answer.text
    node.generation = answer.json()["generation"]
    assert not _contains(answer.content)


def _read_everything(
    admin: RecordingClient, owner: RecordingClient, instance: str, secret: str, registry: str, gpu: str
) -> None:
    """Call every GET operation as an admin and as the project's owner, and read the event stream."""
    me = owner.get("/v1/me").json()
    known = {
        "instance_id": instance, "secret_id": secret, "registry_id": registry, "uuid": gpu,
        "node_id": owner.items("/v1/nodes")[0]["id"], "project_id": me["project"]["id"],
        "key_id": me["key"]["id"],
    }  # fmt: skip
    for path, operations in admin.get("/openapi.json").json()["paths"].items():
        # Logs come from the node; no node sends them in this test.
        if "get" not in operations or operations["get"]["operationId"] == "get_instance_logs":
            continue
        params = {"timeout_s": 1} if path.endswith("/wait") else {}
        filled = "/".join(known.get(part.strip("{}"), part.strip("{}")) for part in path.split("/"))
        for reader in (admin, owner):
            assert reader.get(filled, params=params).status_code != 500
    last = owner.items("/v1/events", limit=200)[-1]["seq"]
    with owner.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as events:
        lines = []
        for line in events.iter_lines():
            lines.append(line)
            if line == f"id: {last}":
                break
        owner.record(events, "\n".join(lines).encode())


def _stored_bytes(service: RunningService, folder: Path) -> bytes:
    """All that the service stores: its files, and every row of a PostgreSQL database as text."""
    files = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    if service.plane.database.is_sqlite:
        return files
    with service.plane.database.read() as session:
        rows = [
            row
            for table in Base.metadata.sorted_tables
            for row in session.scalars(text(f"SELECT stored::text FROM {table.name} AS stored"))
        ]
    return files + "\n".join(rows).encode()


def _require_encrypted(service: RunningService) -> None:
    """The value is stored, encrypted with the key."""
    with service.plane.database.read() as session:
        (encrypted,) = session.scalars(select(Secret.sealed_value).where(Secret.name == "token"))
        assert service.plane.encryptor.decrypt(encrypted).decode() == VALUE
