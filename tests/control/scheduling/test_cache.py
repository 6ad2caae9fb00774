"""The cache of nodes: which changes it reads, and when."""

from collections.abc import Iterator

import pytest

from mooring.control import revisions
from mooring.control.scheduling.node_views import FULL_REFRESH_S, NodeViews, read
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.scheduler.model import NodeView
from tests.nodes import WireNode
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(service: RunningService) -> Database:
    return service.plane.database


@pytest.fixture
def nodes(client: Client) -> Iterator[list[WireNode]]:
    made = [WireNode(client, f"gpu-{number}", gpus=2) for number in range(3)]
    for each in made:
        each.sync()
    yield made
    for each in made:
        each.close()


def _views(database: Database, views: NodeViews) -> dict[str, NodeView]:
    with database.read() as session:
        return {view.name: view for view in views.current(session)}


def test_a_node_that_did_not_change_stays_the_same_object(
    client: Client, database: Database, nodes: list[WireNode]
) -> None:
    views = NodeViews()
    before = _views(database, views)
    client.post(f"/v1/nodes/{nodes[1].id}/cordon")
    nodes[0].sync()  # the same as before
    after = _views(database, views)
    assert after["gpu-0"] is before["gpu-0"]
    assert after["gpu-2"] is before["gpu-2"]
    assert after["gpu-1"].state == "cordoned"
    client.delete(f"/v1/nodes/{nodes[2].id}")
    assert sorted(_views(database, views)) == ["gpu-0", "gpu-1"]


def test_a_rolled_back_change_does_not_reach_the_cache(database: Database, nodes: list[WireNode]) -> None:
    """The change after the rolled back one gets the same revision."""
    views = NodeViews()
    _views(database, views)

    class Undone(Exception):
        pass

    with pytest.raises(Undone), database.write() as session:
        node = session.get_one(Node, nodes[0].id)
        node.cordoned = True
        revisions.changed(session, node.id)
        assert next(view for view in views.current(session) if view.name == "gpu-0").state == "cordoned"
        raise Undone
    with database.write() as session:
        node = session.get_one(Node, nodes[0].id)
        node.draining = True
        revisions.changed(session, node.id)
    assert _views(database, views)["gpu-0"].state == "draining"


def test_a_full_refresh_finds_a_change_without_a_revision(database: Database, nodes: list[WireNode]) -> None:
    clock = Clock()
    views = NodeViews(clock)
    _views(database, views)
    with database.write() as session:
        session.get_one(Node, nodes[0].id).cordoned = True
    assert _views(database, views)["gpu-0"].state == "ready"
    clock.now += FULL_REFRESH_S + 1
    assert _views(database, views)["gpu-0"].state == "cordoned"
    with database.write() as session:  # so that the service's own cache reads the change too
        revisions.changed_many(session, [nodes[0].id])


def test_an_invalidated_node_is_read_again(database: Database, nodes: list[WireNode]) -> None:
    views = NodeViews()
    _views(database, views)
    with database.write() as session:
        session.get_one(Node, nodes[0].id).cordoned = True
    views.invalidate([nodes[0].id])
    assert _views(database, views)["gpu-0"].state == "cordoned"
    with database.write() as session:
        revisions.changed_many(session, [nodes[0].id])


def test_replicas_see_the_same_nodes(client: Client, database: Database, nodes: list[WireNode]) -> None:
    replicas = [NodeViews(), NodeViews()]
    for _ in range(3):
        made = client.create(gpus={"count": 1})
        client.wait(made["id"], "scheduled")
        seen = [_views(database, views) for views in replicas]
        with database.read() as session:
            assert seen[0] == seen[1] == {view.name: view for view in read(session)}
