"""The rows of instances that get a waiting reason are locked in the order of their ids."""

import threading

import pytest
from sqlalchemy import text

from mooring.control import locks
from mooring.control.instances import waiting_reasons
from mooring.db.session import Database
from mooring.scheduler.model import Unplaced
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_instances_with_new_reasons_are_locked_by_id(service: RunningService, client: Client) -> None:
    database = service.plane.database
    first, second = (client.create(gpus={"count": 1})["id"] for _ in range(2))
    for each in (first, second):
        wait_until(lambda: client.instance(each)["reason"]["code"] != "queued")  # noqa: B023 - used at once
    unplaced = [
        Unplaced(second, (), ever=True, summary="first in the alphabet"),
        Unplaced(first, (), ever=True, summary="last"),
    ]
    failures: list[BaseException] = []
    with database.write() as session:
        locks.instances(session, [first])
        thread = threading.Thread(target=_set_reasons, args=(database, unplaced, failures))
        thread.start()
        wait_until(lambda: _waits(database))
        assert locks.instances(session, [second]).keys() == {second}
    thread.join(20)
    assert not failures
    assert client.instance(first)["reason"]["message"] == "last"


def _set_reasons(database: Database, unplaced: list[Unplaced], failures: list[BaseException]) -> None:
    try:
        with database.write() as session:
            waiting_reasons.set_reasons(session, unplaced)
    except Exception as failure:
        failures.append(failure)


def _waits(database: Database) -> bool:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%instances%'"
    )
    with database.read() as session:
        return bool(session.scalar(text(query)))
