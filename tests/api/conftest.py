"""A service that the tests of a module share, and a `Sandbox` on it for each test.

Starting a service takes half a second. A test that reads only its own node and instances can share one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mooring.schemas.agent import Assignment, ObservedInstance, SyncAnswer
from tests.conftest import DATABASES
from tests.nodes import WireNode, observed
from tests.service import Client, RunningService, assert_cache_matches_database, running, settings_for
from tests.testbed.postgres import PostgresCluster


@pytest.fixture(scope="module", params=DATABASES)
def shared_service(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_template: Callable[[str], str],
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("shared")
    with (
        copied(request, migrated_template(request.param), folder) as url,
        running(
            settings_for(
                url,
                folder / "data",
                # All clients have one address, and many use invalid keys on purpose.
                rate_limits="off",
                allowed_registries=("10.0.0.7:5000", "registry:5000"),
            )
        ) as made,
    ):
        yield made


@contextmanager
def copied(request: pytest.FixtureRequest, template: str, folder: Path) -> Iterator[str]:
    """Within the block, a copy of the template database; `request.param` is its kind. Yields its URL."""
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
    """A client of the shared service with an admin key."""
    with shared_service.client as made:
        yield made


class Sandbox:
    """A node with eight H100 for one test, and the running instances that the node reports.

    The instances that `create` makes have a selector, so they are placed on this node only.
    """

    _numbers = count(1)

    def __init__(self, service: RunningService, client: Client) -> None:
        self.service = service
        self.client = client
        self.node = WireNode(client, f"sandbox-{next(self._numbers)}")
        self.node.facts = self.node.facts.model_copy(update={"labels": {"sandbox": self.node.name}})
        self.node.sync()
        self.created_ids: list[str] = []
        self.reported: list[ObservedInstance] = []

    def create(self, **fields: Any) -> dict[str, Any]:
        made = self.client.create(node_selector={"sandbox": self.node.name}, **fields)
        self.created_ids.append(made["id"])
        return made

    def placed(self, **fields: Any) -> Assignment:
        """The assignment of a new scheduled instance."""
        made = self.create(**fields)
        self.client.wait(made["id"], "scheduled")
        return self.assignment(made["id"])

    def running(self, **fields: Any) -> Assignment:
        """The assignment of a new running instance; earlier running instances stay running."""
        assignment = self.placed(**fields)
        self.reported.append(observed(assignment, "running"))
        self.node.sync(*self.reported)
        return assignment

    def assignment(self, instance_id: str) -> Assignment:
        """The assignment of this instance, from the answer to a report that does not list instances."""
        answer = self.node.sync(instances=None)
        return next(item for item in answer.assignments if item.instance_id == instance_id)

    def sync(self, *instances: ObservedInstance, **fields: Any) -> SyncAnswer:
        return self.node.sync(*instances, **fields)

    def close(self) -> None:
        self.client.delete(f"/v1/nodes/{self.node.id}", params={"force": True})
        for instance_id in self.created_ids:
            self.client.delete(f"/v1/instances/{instance_id}")
        self.node.close()


@pytest.fixture
def sandbox(shared_service: RunningService, shared: Client) -> Iterator[Sandbox]:
    # Earlier tests may have left pending instances without a selector: they would be placed on this node.
    for stray in shared.items("/v1/instances", state="pending", limit=200):
        shared.delete(f"/v1/instances/{stray['id']}")
    made = Sandbox(shared_service, shared)
    yield made
    assert_cache_matches_database(shared_service.plane, shared_service.service)
    made.close()
