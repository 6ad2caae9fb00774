"""The cost of a report, which every node sends every few seconds, and reports applied in several parts."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from mooring.control.nodes import reports
from mooring.control.nodes.reports import CHANGES_AT_ONCE
from mooring.db.tables import Node
from mooring.schemas.agent import Assignment
from tests.nodes import WireNode, observed
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases


@contextmanager
def _request_statements(engine: Engine) -> Iterator[list[str]]:
    """The SQL statements of request threads, without those of the loops."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if threading.current_thread().name.startswith("AnyIO"):
            found.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_an_unchanged_report_is_cheap(service: RunningService, client: Client, node: WireNode) -> None:
    made = [client.create(gpus={"count": 2}, cpus=1, memory_mib=64) for _ in range(3)]
    for each in made:
        client.wait(each["id"], "scheduled")
    assignments = node.sync(instances=None).assignments
    node.sync(*(observed(each, "running") for each in assignments))
    with _request_statements(service.plane.database.engine) as statements:
        answer = node.sync(*(observed(each, "running") for each in assignments))
    assert len(answer.assignments) == len(made)
    assert 5 < len(statements) <= 12, statements
    assert sum("gpus.facts" in statement for statement in statements) == 1  # facts are large


MANY = 2 * CHANGES_AT_ONCE + 3


def _scheduled(client: Client, node: WireNode) -> list[Assignment]:
    """Many instances that the node is about to start."""
    for each in [client.create(cpus=0.1, memory_mib=16) for _ in range(MANY)]:
        client.wait(each["id"], "scheduled")
    return node.sync(instances=None).assignments


def _states(client: Client) -> Counter[str]:
    return Counter(each["state"] for each in client.items("/v1/instances", limit=200))


class _PartialReport:
    """A report that all instances run, applied in several transactions; the constructor runs the first."""

    def __init__(self, service: RunningService, node: WireNode, assignments: Sequence[Assignment]) -> None:
        self._database, self._node_id = service.plane.database, node.id
        self._report = node.report(*(observed(each, "running") for each in assignments))
        with self._database.read() as session:
            self._credential_hash = session.get_one(Node, node.id).credential_hash
        with self._database.write() as session:
            applied = reports.apply(session, self._node_id, self._credential_hash, self._report)
        self.left = applied.left

    def apply_next(self) -> None:
        with self._database.write() as session:
            applied = reports.apply_rest(
                session, self._node_id, self._credential_hash, self._report, self.left
            )
        self.left = applied.left


def test_a_report_of_many_changes_is_answered_once_all_are_applied(client: Client, node: WireNode) -> None:
    node.sync(*(observed(each, "running") for each in _scheduled(client, node)))
    assert _states(client) == {"running": MANY}


def test_a_report_of_many_changes_is_applied_in_several_transactions(
    service: RunningService, client: Client, node: WireNode
) -> None:
    parts = _PartialReport(service, node, _scheduled(client, node))
    assert _states(client) == {"running": CHANGES_AT_ONCE, "scheduled": MANY - CHANGES_AT_ONCE}
    parts.apply_next()
    assert _states(client) == {"running": 2 * CHANGES_AT_ONCE, "scheduled": 3}
    parts.apply_next()
    assert not parts.left
    assert _states(client) == {"running": MANY}


def test_the_rest_of_a_report_is_dropped_after_a_newer_one(
    service: RunningService, client: Client, node: WireNode
) -> None:
    assignments = _scheduled(client, node)
    older = _PartialReport(service, node, assignments)
    node.sync(*(observed(each, "running", container_id="newer") for each in assignments))
    older.apply_next()
    assert not older.left
    shown = client.items("/v1/instances", limit=200)
    assert [each["container_id"] for each in shown] == ["newer"] * MANY


def test_an_instance_that_is_deleted_between_two_parts_does_not_run_again(
    service: RunningService, client: Client, node: WireNode
) -> None:
    parts = _PartialReport(service, node, _scheduled(client, node))
    instance_id = parts.left[0]
    assert client.delete(f"/v1/instances/{instance_id}").is_success
    deleted = client.instance(instance_id)["state"]
    parts.apply_next()
    assert client.instance(instance_id)["state"] == deleted != "running"
    assert _states(client)["running"] == 2 * CHANGES_AT_ONCE - 1
