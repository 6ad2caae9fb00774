"""Of several replicas on PostgreSQL one leads, and another one follows it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from mooring.control.scheduling.cache import SchedulerCache
from mooring.db.notifications import Listener
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.loops.scheduling import Scheduling
from tests.service import RunningService
from tests.testbed.waiting import wait_until

postgresql_only = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@contextmanager
def replica(url: str) -> Iterator[Database]:
    database = Database(url, Signals())
    listener = Listener(database, lambda problem: pytest.fail(str(problem)))
    listener.start()
    try:
        yield database
    finally:
        listener.stop()
        database.dispose()


@postgresql_only  # SQLite has one process
def test_one_replica_leads_until_it_ends(database_url: str) -> None:
    with ExitStack() as first_lives, replica(database_url) as second:
        wait_until(lambda: second.leads)
        first = first_lives.enter_context(replica(database_url))
        probes = first.availability.answered_at
        wait_until(lambda: first.availability.answered_at > probes + 1)
        assert (first.leads, second.leads) == (False, True)
    with replica(database_url) as third:
        wait_until(lambda: third.leads)


@postgresql_only
def test_another_replica_leads_once_the_leader_has_ended(database_url: str) -> None:
    with ExitStack() as lives:
        leader = lives.enter_context(replica(database_url))
        wait_until(lambda: leader.leads)
        with replica(database_url) as other:
            lives.close()
            wait_until(lambda: other.leads)


def test_a_replica_that_does_not_lead_schedules_too(service: RunningService) -> None:
    """Only later: the leader may stand still while its connection stays."""
    url = service.plane.database.url.render_as_string(hide_password=False)
    database, cache = Database(url, Signals()), SchedulerCache()
    database.leads = False
    loop = Scheduling(database, cache)
    assert 0 < loop.rest_after(0) <= 1
    loop.start()
    try:
        first = wait_until(lambda: cache.last_cycle)
        loop.wake()
        wait_until(lambda: cache.last_cycle is not first)
    finally:
        loop.stop()
        database.dispose()
