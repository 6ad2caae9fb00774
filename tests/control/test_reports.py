"""What a report costs: every node reports every few seconds, so each statement counts a thousand times."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event

from tests.nodes import WireNode, seen
from tests.service import Client, RunningService


@contextmanager
def _of_requests(engine: Engine) -> Iterator[list[str]]:
    """The statements of the threads that answer requests; the loops have threads of their own."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if threading.current_thread().name.startswith("AnyIO"):
            found.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_a_report_of_nothing_new_is_cheap(service: RunningService, client: Client, node: WireNode) -> None:
    made = [client.create(gpus={"count": 2}, cpus=1, memory_mib=64) for _ in range(3)]
    for each in made:
        client.wait(each["id"], "scheduled")
    assignments = node.sync(instances=None).assignments
    node.sync(*(seen(each, "running") for each in assignments))
    with _of_requests(service.plane.database.engine) as statements:
        heard = node.sync(*(seen(each, "running") for each in assignments))
    assert len(heard.assignments) == len(made)
    assert 5 < len(statements) <= 11, statements
    assert sum("gpus.facts" in statement for statement in statements) == 1  # they are long
