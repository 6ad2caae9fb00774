"""A service that the tests of a module share, and a corner of it for each test.

A service of its own costs a test half a second; a test that looks at nothing but its own node and instances
needs none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mooring.schemas.agent import Assignment, ObservedInstance, SyncAnswer
from tests.conftest import DATABASES
from tests.nodes import WireNode, seen
from tests.service import Client, RunningService, assert_world_is_true, running, settings_for
from tests.testbed.postgres import PostgresCluster


@pytest.fixture(scope="module", params=DATABASES)
def shared_service(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_template: Callable[[str], str],
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("shared")
    # Off: all clients here come from one address, and many are strangers on purpose.
    with (
        copied(request, migrated_template(request.param), folder) as url,
        running(
            settings_for(
                url,
                folder / "data",
                start_timeout_s=2,
                rate_limits="off",
                allowed_registries=("10.0.0.7:5000", "registry:5000"),
            )
        ) as made,
    ):
        yield made


@contextmanager
def copied(request: pytest.FixtureRequest, template: str, folder: Path) -> Iterator[str]:
    """The URL of a database of the kind that `request.param` names, copied from the template."""
    if request.param == "sqlite":
        (folder / "mooring.db").write_bytes(Path(template.removeprefix("sqlite:///")).read_bytes())
        yield f"sqlite:///{folder / 'mooring.db'}"
        return
    cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
    url = cluster.create_database(template)
    yield url
    cluster.drop_database(url)


@pytest.fixture(scope="module")
def shared(shared_service: RunningService) -> Iterator[Client]:
    """An admin's client of the shared service."""
    with shared_service.client as made:
        yield made


class Corner:
    """A node of eight H100 on which only this test's instances are placed, and what it last reported."""

    _numbers = count(1)

    def __init__(self, service: RunningService, client: Client) -> None:
        self.service = service
        self.client = client
        self.node = WireNode(client, f"corner-{next(self._numbers)}")
        self.node.facts = self.node.facts.model_copy(update={"labels": {"corner": self.node.name}})
        self.node.sync()
        self.made: list[str] = []
        self.ran: list[ObservedInstance] = []

    def create(self, **fields: Any) -> dict[str, Any]:
        made = self.client.create(node_selector={"corner": self.node.name}, **fields)
        self.made.append(made["id"])
        return made

    def placed(self, **fields: Any) -> Assignment:
        """A scheduled instance, as its node was told of it."""
        made = self.create(**fields)
        self.client.wait(made["id"], "scheduled")
        return self.assignment(made["id"])

    def running(self, **fields: Any) -> Assignment:
        """A running instance, and so are those that this gave before."""
        assignment = self.placed(**fields)
        self.ran.append(seen(assignment, "running"))
        self.node.sync(*self.ran)
        return assignment

    def assignment(self, instance_id: str) -> Assignment:
        """What the node should have of this instance; the report that asks says nothing of instances."""
        heard = self.node.sync(instances=None)
        return next(item for item in heard.assignments if item.instance_id == instance_id)

    def sync(self, *instances: ObservedInstance, **fields: Any) -> SyncAnswer:
        return self.node.sync(*instances, **fields)

    def close(self) -> None:
        self.client.delete(f"/v1/nodes/{self.node.id}", params={"force": True})
        for instance_id in self.made:
            self.client.delete(f"/v1/instances/{instance_id}")
        self.node.close()


@pytest.fixture
def corner(shared_service: RunningService, shared: Client) -> Iterator[Corner]:
    # What earlier tests left in the queue without a selector would be placed here.
    for stray in shared.items("/v1/instances", state="pending", limit=200):
        shared.delete(f"/v1/instances/{stray['id']}")
    made = Corner(shared_service, shared)
    yield made
    assert_world_is_true(shared_service.plane, shared_service.service)
    made.close()
