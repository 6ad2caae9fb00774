"""When a node counts as silent: only time in which its reports could be stored counts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from mooring.loops.node_health import NodeHealth
from tests.nodes import WireNode
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

UNREACHABLE_AFTER_S = 30.0


class Nodes:
    """Two nodes, and the loop that watches them by a clock that the test moves."""

    def __init__(self, service: RunningService, client: Client) -> None:
        self.client = client
        self.database = service.plane.database
        self.now = 1000.0
        self.loop = NodeHealth(self.database, UNREACHABLE_AFTER_S, 300.0, clock=lambda: self.now)
        self.silent, self.live = WireNode(client, "silent"), WireNode(client, "live")
        self.silent.sync()
        self.live.sync()

    def close(self) -> None:
        self.silent.close()
        self.live.close()

    def pass_time(self, seconds: int) -> None:
        """A tick every two seconds; one of the nodes reports before each."""
        for _ in range(seconds // 2):
            self.now += 2
            self.live.sync()
            self.loop.tick()

    @contextmanager
    def failing(self, *statements: str) -> Iterator[None]:
        """Within the block, such statements of this thread fail, as on a full disk or without a server."""
        here = threading.get_ident()

        def fail(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
            if threading.get_ident() == here and statement.split(maxsplit=1)[0] in statements:
                raise OperationalError(statement, None, Exception("disk is full"))

        event.listen(self.database.engine, "before_cursor_execute", fail)
        try:
            yield
        finally:
            event.remove(self.database.engine, "before_cursor_execute", fail)

    @property
    def states(self) -> dict[str, str]:
        return {node["name"]: node["state"] for node in self.client.items("/v1/nodes")}


@pytest.fixture
def nodes(service: RunningService, client: Client) -> Iterator[Nodes]:
    made = Nodes(service, client)
    yield made
    made.close()


BOTH_READY = {"silent": "ready", "live": "ready"}


def test_a_node_without_reports_becomes_unreachable_and_others_do_not(nodes: Nodes) -> None:
    nodes.pass_time(30)
    assert nodes.states == BOTH_READY
    nodes.pass_time(4)
    assert nodes.states == {"silent": "unreachable", "live": "ready"}
    nodes.silent.sync()
    assert nodes.states == BOTH_READY


@pytest.mark.parametrize("statements", [("SELECT",), ("UPDATE", "INSERT")], ids=["unavailable", "full"])
def test_an_outage_of_the_database_is_no_silence(nodes: Nodes, statements: tuple[str, ...]) -> None:
    """Nobody could report for 42 s. The node has the full time to report after the outage."""
    nodes.pass_time(20)
    with nodes.failing(*statements):
        for _ in range(21):
            nodes.now += 2
            with pytest.raises(OperationalError):
                nodes.loop.tick()
    nodes.pass_time(30)
    assert nodes.states == BOTH_READY
    nodes.pass_time(4)
    assert nodes.states == {"silent": "unreachable", "live": "ready"}


def test_a_pause_of_the_process_is_no_silence(nodes: Nodes) -> None:
    nodes.pass_time(20)
    nodes.now += 60
    nodes.pass_time(30)
    assert nodes.states == BOTH_READY
    nodes.pass_time(4)
    assert nodes.states == {"silent": "unreachable", "live": "ready"}
