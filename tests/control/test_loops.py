"""A failed item does not stop a loop, a rest is short, and a new process reads the recent requests."""

import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from mooring.control.scheduling import pending
from mooring.control.scheduling.cache import SchedulerCache
from mooring.db.session import Database
from mooring.loops.loop import Loop
from mooring.loops.scheduling import Scheduling
from tests.nodes import WireNode
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases


class Halves(Loop):
    """A loop that halves numbers and fails for odd ones."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.found: list[int] = []

    def tick(self) -> None:
        self.each([2, 3, 4, 5, 6], self._halve)

    def _halve(self, _session: Session, number: int) -> None:
        if number % 2:
            raise ValueError(number)
        self.found.append(number // 2)


class Counting(Loop):
    """A loop that would rest for more than three minutes after a tick that used the CPU for 20 ms."""

    rest_factor = 10_000.0
    interval_s = 0.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1


class Busy(Counting):
    max_rest_s = 0.1

    def tick(self) -> None:
        super().tick()
        began = time.thread_time()
        while time.thread_time() - began < 0.03:
            pass


class Waiting(Counting):
    """A loop that waits, such as for the database."""

    max_rest_s = 3600.0

    def tick(self) -> None:
        super().tick()
        threading.Event().wait(0.05)


@pytest.fixture
def database(service: RunningService) -> Iterator[Database]:
    yield service.plane.database


def test_a_failed_item_does_not_stop_the_others(database: Database) -> None:
    halves = Halves(database)
    with pytest.raises(ExceptionGroup) as raised:
        halves.tick()
    assert halves.found == [1, 2, 3]
    assert [failure.args for failure in raised.value.exceptions] == [(3,), (5,)]


@pytest.mark.parametrize("kind", [Busy, Waiting])
def test_the_rest_after_a_long_tick_is_limited(database: Database, kind: type[Counting]) -> None:
    """A tick that waits for a frozen database takes as long as the freeze; no rest may follow it."""
    loop = kind(database)
    loop.start()
    try:
        wait_until(lambda: loop.ticks >= 2, 20)
    finally:
        loop.stop()


def test_a_new_process_reads_recent_requests(client: Client, database: Database, node: WireNode) -> None:
    for gpus in (3, 5):
        template = {"image": "mooring-test/busybox:1", "gpus": {"count": gpus}}
        group = client.post("/v1/instance-groups", json={"count": 30, "template": template}).json()
        client.delete(f"/v1/instance-groups/{group['id']}")
    cache = SchedulerCache()
    Scheduling(database, cache).tick()
    assert cache.last_cycle is not None
    snapshot = cache.last_cycle.snapshot
    assert snapshot.requests == ()
    assert snapshot.potential is not None
    # The shapes of the recent requests; without requests there is only one.
    assert len(snapshot.potential.needs([]).hosts) == 2


def test_the_newest_requests_are_read_first(client: Client, database: Database) -> None:
    made = [client.create(gpus={"count": count}) for count in (8, 2, 9)]
    client.delete(f"/v1/instances/{made[-1]['id']}")
    with database.read() as session:
        assert [each.gpu_count for each in pending.recent_requests(session, 2)] == [9, 2]
