"""Registry credentials: access to them, and the starts that get them."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from mooring.schemas.agent import RegistryAuth
from tests.api.conftest import Sandbox
from tests.api.tenants.test_secrets import Tenant
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client

IMAGE = "registry.example/team/image:1"


@pytest.fixture
def tenant(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"registries-{uuid4().hex[:8]}") as made:
        yield made


def _body(**fields: object) -> dict[str, object]:
    return {"server": "registry.example", "username": "ci", "password": "swordfish", **fields}


def test_a_password_is_stored_and_never_returned(tenant: Tenant) -> None:
    answer = tenant.owner.post("/v1/registries", json=_body())
    made = answer.json()
    path = answer.headers["location"]
    assert (answer.status_code, path) == (201, f"/v1/registries/{made['id']}")
    assert made.keys() == {"id", "server", "username", "project_id", "created_at"}
    assert (made["server"], made["username"], made["project_id"]) == ("registry.example", "ci", tenant.id)
    assert tenant.owner.get(path).json() == made
    assert tenant.owner.items("/v1/registries") == [made]
    assert tenant.owner.put(path, json={"password": "marlin"}).json() == made
    assert tenant.owner.delete(path).status_code == 204
    problem(tenant.owner.get(path), 404, "not_found")
    problem(tenant.owner.delete(path), 404, "not_found")
    entries = tenant.owner.items("/v1/audit-log")[:3]
    assert [entry["action"] for entry in entries] == [
        "registry.delete",
        "registry.replace",
        "registry.create",
    ]
    assert "swordfish" not in str(entries)
    assert "marlin" not in str(entries)


def test_owners_change_registries_and_all_members_see_them(shared: Client, tenant: Tenant) -> None:
    made = tenant.owner.post("/v1/registries", json=_body()).json()
    path = f"/v1/registries/{made['id']}"
    for caller in (tenant.member, tenant.viewer):
        assert caller.get(path).json() == made
        problem(caller.post("/v1/registries", json=_body(server="ghcr.io")), 403, "forbidden")
        problem(caller.put(path, json={"password": "x"}), 403, "forbidden")
        problem(caller.delete(path), 403, "forbidden")
    with Tenant(shared, f"others-{uuid4().hex[:8]}") as other:
        for answer in (
            other.owner.get(path),
            other.owner.put(path, json={"password": "x"}),
            other.owner.delete(path),
            other.owner.post("/v1/registries", json=_body(project_id=tenant.id)),
        ):
            problem(answer, 404, "not_found")
        assert other.owner.items("/v1/registries") == []
        assert other.owner.items("/v1/registries", project_id=tenant.id) == []
        assert other.owner.post("/v1/registries", json=_body()).status_code == 201


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("docker.io", "docker.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("GHCR.io", "ghcr.io"),
        ("http://10.0.0.7:5000/v2", "10.0.0.7:5000"),
        ("registry:5000", "registry:5000"),
    ],
)
def test_a_server_name_is_normalized(tenant: Tenant, written: str, shown: str) -> None:
    made = tenant.owner.post("/v1/registries", json=_body(server=written))
    assert made.json()["server"] == shown
    again = tenant.owner.post("/v1/registries", json=_body(server=f"https://{shown}/"))
    assert problem(again, 409, "name_taken")["server"] == shown


@pytest.mark.parametrize(
    "server",
    ["", "registry", "ghcr.io/team", "a b.example", "ghcr.io:", "ftp://ghcr.io", "u:p@ghcr.io", "../x.y"],
)
def test_an_invalid_server_name_is_rejected(tenant: Tenant, server: str) -> None:
    answer = tenant.owner.post("/v1/registries", json=_body(server=server))
    assert [item["pointer"] for item in problem(answer, 422)["errors"]] == ["/server"]


@pytest.mark.parametrize(
    "body",
    [
        _body(password=["swordfish"]),
        _body(password="swordfish\0"),
        _body(password="swordfish" * 1000),
        _body(username=7),
        {"server": "ghcr.io", "username": "ci", "pass": "swordfish"},
        ["swordfish"],
    ],
)
def test_a_rejection_does_not_contain_the_sent_values(tenant: Tenant, body: object) -> None:
    answer = tenant.owner.post("/v1/registries", json=body)
    assert answer.status_code in {400, 422}
    assert "swordfish" not in answer.text


def test_a_start_gets_the_projects_credentials_for_the_images_registry(
    sandbox: Sandbox, tenant: Tenant
) -> None:
    credentials = tenant.owner.post("/v1/registries", json=_body()).json()
    tenant.owner.post("/v1/registries", json=_body(server="docker.io", password="of docker hub"))
    placed = sandbox.placed(project_id=tenant.id, image=IMAGE)
    expected = RegistryAuth(server="registry.example", username="ci", password="swordfish")
    assert sandbox.node.start_secrets(placed).registry == expected
    official = sandbox.placed(project_id=tenant.id, image="busybox")
    of_docker_hub = sandbox.node.start_secrets(official).registry
    assert of_docker_hub is not None
    assert of_docker_hub.password == "of docker hub"
    for without_credentials in (
        sandbox.placed(project_id=tenant.id, image="ghcr.io/x/y"),
        sandbox.placed(image=IMAGE),  # an instance of another project
    ):
        assert not without_credentials.asks_for_secrets
        assert sandbox.node.start_secrets(without_credentials).registry is None

    sandbox.sync(observed(placed, "starting"))
    assert sandbox.node.start_secrets(placed).registry == expected
    sandbox.sync(observed(placed, "running"))
    problem(sandbox.node.post_start_secrets(placed), 404, "not_found")

    tenant.owner.put(f"/v1/registries/{credentials['id']}", json={"password": "marlin"})
    sandbox.client.post(f"/v1/instances/{placed.instance_id}/restart")
    second = sandbox.assignment(placed.instance_id)
    again = sandbox.node.start_secrets(second).registry
    assert again is not None
    assert again.password == "marlin"
    tenant.owner.delete(f"/v1/registries/{credentials['id']}")
    assert sandbox.node.start_secrets(second).registry is None
