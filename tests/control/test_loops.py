"""Loops: a failed item does not stop one, rests are short, and what scheduling reads and caches."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from mooring.control.scheduling import cache as cache_module
from mooring.control.scheduling import pending
from mooring.control.scheduling.cache import SchedulerCache
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables.machines import Node
from mooring.loops.loop import Loop
from mooring.loops.scheduling import Scheduling
from tests.nodes import WireNode
from tests.service import Client, RunningService, running, settings_for
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


def test_many_creates_one_after_the_other_share_cycles(database: Database) -> None:
    """A cycle for each would take the interpreter from the requests: 75 % of a core with one client."""
    database.leads = True
    loop = Scheduling(database, SchedulerCache())
    pauses = [loop.rest_after(0.005) for _ in range(100)]
    assert pauses[0] == 0
    assert 0.1 < pauses[-1] <= 0.2 + 1e-9


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


def test_the_node_cache_is_excluded_from_garbage_collections_as_it_grows(
    database_url: str, tmp_path: Path
) -> None:
    """A full collection of the cache of thousands of nodes blocks all requests."""
    with running(settings_for(database_url, tmp_path / "data")) as service, service.client as admin:
        node = WireNode(admin, "gpu-1")
        node.sync()
        node.close()
    database, excluded = Database(database_url, Signals()), []
    loop = Scheduling(database, SchedulerCache())
    for added in (998, 1, 249, 1):
        copy_node(database, node.id, added)
        gc.unfreeze()
        loop.tick()
        excluded.append(gc.get_freeze_count() > 0)
    gc.unfreeze()
    database.dispose()
    # With 999, 1,000, 1,249 and 1,250 nodes.
    assert excluded == [False, True, False, True]


def test_a_long_queue_is_in_order_before_a_client_asks(
    client: Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MANY_NEW", 3)
    client.create(gpus={"count": 9})
    ordered = []
    for _ in range(2):
        client.create(gpus={"count": 9})
        cache = SchedulerCache()
        Scheduling(database, cache).tick()
        with database.read() as session, cache.evaluating(session) as evaluation:
            ordered.append("line" in vars(evaluation))
    assert ordered == [False, True]


def test_scheduling_does_not_wait_for_an_evaluation(
    client: Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MANY_NEW", 1)
    client.create(gpus={"count": 9})
    cache = SchedulerCache()
    with cache.evaluating_lock:
        Scheduling(database, cache).tick()
    assert cache.last_cycle is not None


def copy_node(database: Database, node_id: str, times: int) -> None:
    """Insert rows like this node's, without GPUs."""
    names = [str(uuid4()) for _ in range(times)]
    with database.write() as session:
        row = session.execute(select(Node.__table__).where(Node.id == node_id)).mappings().one()
        session.execute(
            insert(Node), [{**row, "id": name, "name": name, "credential_hash": name} for name in names]
        )
