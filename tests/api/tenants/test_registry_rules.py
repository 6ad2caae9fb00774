"""R25: images and registries inside the operator's network are refused, unless an admin lists them."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.api.conftest import Sandbox
from tests.api.tenants.test_secrets import Tenant
from tests.problems import problem
from tests.service import Client

INSIDE = [
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


@pytest.mark.parametrize("image", INSIDE)
def test_an_image_inside_the_network_is_refused(tenant: Tenant, image: str) -> None:
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
def test_credentials_for_the_inside_are_refused(tenant: Tenant, server: str) -> None:
    body = {"server": server, "username": "u", "password": "p"}
    document = problem(tenant.owner.post("/v1/registries", json=body), 422, "registry_not_allowed")
    assert document["errors"][0]["pointer"] == "/server"


def test_what_an_admin_lists_is_allowed_and_its_node_is_told(
    sandbox: Sandbox, shared: Client, tenant: Tenant
) -> None:
    told = {}
    for image in ("10.0.0.7:5000/team/image:1", "registry.example.com/team/image:1"):
        made = tenant.member.create(image=image, node_selector={"sandbox": sandbox.node.name})
        sandbox.made.append(made["id"])
        tenant.member.wait(made["id"], "scheduled")
        told[image] = sandbox.assignment(made["id"]).registry_listed
    assert told == {"10.0.0.7:5000/team/image:1": True, "registry.example.com/team/image:1": False}


def test_loopback_is_for_the_default_project_of_a_service_on_loopback(
    sandbox: Sandbox, tenant: Tenant
) -> None:
    made = sandbox.placed(image="localhost:5000/own/build:1")
    assert made.registry_listed is True
    body = {"image": "localhost:5000/own/build:1"}
    problem(tenant.member.post("/v1/instances", json=body), 422, "registry_not_allowed")


def test_a_start_is_refused_when_the_list_no_longer_names_the_registry(
    sandbox: Sandbox, tenant: Tenant
) -> None:
    """As it is of instances that were made before there was a list."""
    made = tenant.member.create(image="10.0.0.7:5000/x", node_selector={"sandbox": "nowhere"})
    sandbox.made.append(made["id"])
    path = f"/v1/instances/{made['id']}"
    assert tenant.member.post(f"{path}/stop").status_code == 202
    info = sandbox.service.plane.database.session_info
    rules = dict(info)
    info.clear()
    try:
        problem(tenant.member.post(f"{path}/start"), 422, "registry_not_allowed")
    finally:
        info.update(rules)
    assert tenant.member.post(f"{path}/start").status_code == 202
