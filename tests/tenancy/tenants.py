"""Two tenants with users and keys, created over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from mooring.db.tables import ApiKey
from mooring.db.types import now
from mooring_client.schemas.projects import Role
from tests.nodes import SimulatedNode, WireNode, simulated_node
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

IMAGE = "mooring-test/busybox:1"
NOWHERE = {"sandbox": "nowhere"}  # no node has this label: such an instance stays pending


def post(client: Client, path: str, **body: Any) -> dict[str, Any]:
    """Send a POST request, which must answer 201; return the created object."""
    answer = client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def make_key(client: Client, **body: Any) -> dict[str, Any]:
    """Create a key; return the answer with its secret."""
    return post(client, "/v1/api-keys", **{"name": "made in a test", **body})


class UserWithKey:
    """A user in a project, with a personal key."""

    def __init__(self, admin: Client, project_id: str, project: str, role: Role) -> None:
        address = f"{role}@{project}.example"
        self.user = post(admin, "/v1/users", name=f"{role} of {project}", email=address)
        self.id: str = self.user["id"]
        path = f"/v1/projects/{project_id}/members/{self.id}"
        assert admin.put(path, json={"role": role}).status_code == 200
        self.key = make_key(admin, project_id=project_id, user_id=self.id, role=role)
        self.client = Client(str(admin.base_url), key=self.key["key"])


class Tenant:
    """A project with an owner, a member, a viewer and a service key."""

    def __init__(self, admin: Client, name: str) -> None:
        self.name = name
        self.id: str = post(admin, "/v1/projects", name=name, labels={"tenant": name})["id"]
        self.people = {role: UserWithKey(admin, self.id, name, role) for role in Role}
        self.service = make_key(admin, project_id=self.id, role="member", name=f"service of {name}")

    @property
    def owner(self) -> Client:
        return self.people[Role.OWNER].client

    @property
    def member(self) -> Client:
        return self.people[Role.MEMBER].client

    @property
    def viewer(self) -> Client:
        return self.people[Role.VIEWER].client

    def close(self) -> None:
        for person in self.people.values():
            person.client.close()


class Setup:
    """An admin, the tenants `a` and `b`, a simulated node `working` and a `WireNode`.

    Attributes:
        running: an instance of `a` with a GPU, on the working node.
        pending: an instance of `a` that no node can host.
    """

    def __init__(self, service: RunningService, admin: Client, working: SimulatedNode) -> None:
        self.service = service
        self.admin = admin
        self.working = working
        self.a, self.b = Tenant(admin, "alpha"), Tenant(admin, "beta")
        self.wire = WireNode(admin, "wire")
        self.wire.facts = self.wire.facts.model_copy(update={"labels": {"sandbox": "wire"}})
        self.wire.sync()
        selector = {"sandbox": "working"}
        running = self.a.member.create(name="a-runs", node_selector=selector, gpus={"count": 1})
        self.running: str = running["id"]
        self.pending = self.pending_instance(name="a-waits", labels={"of": "alpha"})
        self.gpu: str = admin.wait(self.running, "running")["devices"][0]["uuid"]

    def pending_instance(self, client: Client | None = None, **fields: Any) -> str:
        """The ID of a new pending instance, of `a` unless `client` belongs to another tenant."""
        made = (client or self.a.member).create(node_selector=NOWHERE, **fields)
        return str(made["id"])

    def close(self) -> None:
        self.a.close()
        self.b.close()
        self.wire.close()


@contextmanager
def setup_of(service: RunningService, admin: Client, directory: Path) -> Iterator[Setup]:
    """Within the block, a service with the two tenants."""
    with simulated_node(admin, directory, "working", gpus=4, labels={"sandbox": "working"}) as working:
        made = Setup(service, admin, working)
        try:
            yield made
        finally:
            made.close()


def expired_key(setup: Setup, project_id: str) -> str:
    """A key that has expired and is rejected."""
    made = make_key(setup.admin, project_id=project_id, role="member")
    with setup.service.plane.database.write() as session:
        session.get_one(ApiKey, made["id"]).expires_at = now() - timedelta(seconds=1)
    with Client(str(setup.admin.base_url), key=made["key"]) as caller:
        wait_until(lambda: caller.get("/v1/me").status_code == 401)
    return str(made["key"])


def revoked_key(client: Client, project_id: str) -> str:
    """A key that was revoked before its first use."""
    made = make_key(client, project_id=project_id, role="member")
    assert client.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    with Client(str(client.base_url), key=made["key"]) as caller:
        problem(caller.get("/v1/me"), 401, "unauthorized")
    return str(made["key"])
