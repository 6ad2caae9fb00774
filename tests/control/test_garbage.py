"""Reference cycles are freed soon, and those that became garbage late are freed too."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.loops.garbage import GarbageCollection
from tests.service import RunningService


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def loop(database_url: str) -> Iterator[GarbageCollection]:
    """The only one that collects."""
    database = Database(database_url, Signals())
    gc.disable()
    yield GarbageCollection(database)
    gc.enable()
    database.dispose()


@pytest.mark.parametrize(("survived", "freed_after"), [(0, 1), (1, 300), (301, 3000)])
def test_a_cycle_is_freed(loop: GarbageCollection, survived: int, freed_after: int) -> None:
    """An object is visited less often the more collections it has survived."""
    cycle = Cycle()
    for _ in range(survived):
        loop.tick()
    freed = weakref.ref(cycle)
    del cycle
    for _ in range(survived, freed_after - 1):
        loop.tick()
    assert freed() is not None
    loop.tick()
    assert freed() is None


def test_a_service_collects(service: RunningService) -> None:
    assert GarbageCollection.__name__ in {thread.name for thread in threading.enumerate()}
