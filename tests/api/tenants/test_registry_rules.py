"""R25: images and registries in the operator's network are rejected unless an admin lists them."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.api.conftest import Sandbox
from tests.api.tenants.test_secrets import Tenant
from tests.problems import problem
from tests.service import Client

INTERNAL_IMAGES = [
    "169.254.169.254/latest/meta-data:x",
    "localhost:8755/v1/instances",
    "LOCALHOST/v1/instances",
    "127.0.0.1:2375/containers/json",
    "127.1:2375/containers/json",
    "2130706433:2375/containers/json",
    "0x7f000001:2375/containers/json",
    "10.0.0.1:5000/x",
    "100.64.0.1/x",
    "168.63.129.16/x",
    "metadata.google.internal/x/y",
    "printer.local/x/y",
    "intern:5000/x",
]


@pytest.fixture
def tenant(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"registry-rules-{uuid4().hex[:8]}") as made:
        yield made


@pytest.mark.parametrize("image", INTERNAL_IMAGES)
def test_an_image_in_the_operators_network_is_rejected(tenant: Tenant, image: str) -> None:
    body = {"image": image, "node_selector": {"sandbox": "nowhere"}}
    for answer in (
        tenant.member.post("/v1/instances", json=body),
        tenant.member.post("/v1/instances", params={"dry_run": "true"}, json=body),
        tenant.member.post("/v1/instance-groups", json={"count": 2, "template": body}),
    ):
        document = problem(answer, 422, "registry_not_allowed")
        assert document["errors"][0]["pointer"] == "/image"


@pytest.mark.parametrize(
    "server", ["127.0.0.1:2375", "localhost", "10.0.0.1", "metadata.google.internal", "intern:5000"]
)
def test_credentials_for_an_internal_registry_are_rejected(tenant: Tenant, server: str) -> None:
    body = {"server": server, "username": "u", "password": "p"}
    document = problem(tenant.owner.post("/v1/registries", json=body), 422, "registry_not_allowed")
    assert document["errors"][0]["pointer"] == "/server"


def test_a_listed_registry_is_allowed_and_marked_in_the_assignment(
    sandbox: Sandbox, shared: Client, tenant: Tenant
) -> None:
    listed = {}
    for image in ("10.0.0.7:5000/team/image:1", "registry.example.com/team/image:1"):
        made = tenant.member.create(image=image, node_selector={"sandbox": sandbox.node.name})
        sandbox.created_ids.append(made["id"])
        tenant.member.wait(made["id"], "scheduled")
        listed[image] = sandbox.assignment(made["id"]).registry_listed
    assert listed == {"10.0.0.7:5000/team/image:1": True, "registry.example.com/team/image:1": False}


def test_only_the_default_project_of_a_loopback_service_uses_loopback_registries(
    sandbox: Sandbox, tenant: Tenant
) -> None:
    made = sandbox.placed(image="localhost:5000/own/build:1")
    assert made.registry_listed is True
    body = {"image": "localhost:5000/own/build:1"}
    problem(tenant.member.post("/v1/instances", json=body), 422, "registry_not_allowed")


def test_a_start_is_rejected_when_the_registry_is_no_longer_listed(sandbox: Sandbox, tenant: Tenant) -> None:
    """The rule also applies to instances that were created while the registry was listed."""
    made = tenant.member.create(image="10.0.0.7:5000/x", node_selector={"sandbox": "nowhere"})
    sandbox.created_ids.append(made["id"])
    path = f"/v1/instances/{made['id']}"
    assert tenant.member.post(f"{path}/stop").status_code == 202
    # Without its settings, the service allows no internal registry.
    info = sandbox.service.plane.database.session_info
    rules = dict(info)
    info.clear()
    try:
        problem(tenant.member.post(f"{path}/start"), 422, "registry_not_allowed")
    finally:
        info.update(rules)
    assert tenant.member.post(f"{path}/start").status_code == 202
