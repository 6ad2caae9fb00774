"""Which waiting reasons are written when, and in which order their rows are locked."""

import threading
from collections.abc import Sequence

import pytest
from sqlalchemy import select, text, update

from mooring.control import locks
from mooring.control.instances import waiting_reasons
from mooring.db.session import Database
from mooring.db.tables import Instance
from mooring.loops.waiting_reasons import WaitingReasons
from mooring.scheduler.model import Unplaced
from mooring.scheduler.plan import Waiting
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_instances_with_new_reasons_are_locked_by_id(service: RunningService, client: Client) -> None:
    database = service.plane.database
    first, second = (client.create(gpus={"count": 1})["id"] for _ in range(2))
    for each in (first, second):
        wait_until(lambda: client.instance(each)["reason"]["code"] != "queued")  # noqa: B023 - used at once
    unplaced = {
        second: Unplaced(second, (), ever=True, summary="first in the alphabet"),
        first: Unplaced(first, (), ever=True, summary="last"),
    }
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


def _set_reasons(database: Database, unplaced: dict[str, Unplaced], failures: list[BaseException]) -> None:
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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Writer:
    """Writes reasons to instances that the service's own loop has already considered, and leaves alone."""

    def __init__(self, database: Database, instance_ids: Sequence[str]) -> None:
        self.clock = Clock()
        self._database = database
        self._queued = tuple((0.0, instance_id) for instance_id in instance_ids)
        self._reasons = WaitingReasons(database, self.clock)

    def write(self, summary: str, code: str = "waiting_for_capacity") -> list[str]:
        """Let all wait for this reason, and return the messages that are then stored."""
        why = Unplaced("", (), ever=True, summary=summary, code=code)
        self._reasons.write([Waiting(self._queued, why)])
        with self._database.read() as session:
            reasons = session.scalars(select(Instance.reason).order_by(Instance.id)).all()
        return [reason["message"] for reason in reasons if reason]


@pytest.fixture
def writer(service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.setattr("mooring.loops.waiting_reasons._MOST_REWRITTEN", 1)
    monkeypatch.setattr("mooring.loops.waiting_reasons._REWRITTEN_PER_S", 1)
    made = [client.create(gpus={"count": 1})["id"] for _ in range(3)]
    for each in made:
        wait_until(lambda: client.instance(each)["reason"]["code"] != "queued")  # noqa: B023 - used at once
    return Writer(service.plane.database, made)


@pytest.mark.both_databases
def test_new_reasons_are_written_at_once(writer: Writer) -> None:
    assert writer.write("first") == ["first"] * 3
    assert writer.write("second", "quota") == ["second"] * 3


@pytest.mark.both_databases
def test_changed_sentences_are_written_at_a_limited_rate(writer: Writer) -> None:
    writer.write("first")
    assert sorted(writer.write("second")) == ["first", "first", "second"]
    assert sorted(writer.write("third")) == ["first", "first", "second"]
    writer.clock.now += 1
    assert sorted(writer.write("third")) == ["first", "second", "third"]
    for _ in range(3):
        writer.clock.now += 1
        last = writer.write("third")
    assert last == ["third"] * 3


@pytest.mark.both_databases
def test_unchanged_reasons_are_written_again_from_time_to_time(
    writer: Writer, service: RunningService
) -> None:
    """Another replica that saw an older state of the cluster may have written them."""
    writer.write("ours")
    with service.plane.database.write() as session:
        session.execute(update(Instance).values(reason={"code": "waiting_for_capacity", "message": "theirs"}))
    assert writer.write("ours") == ["theirs"] * 3
    for _ in range(4):
        writer.clock.now += 61
        last = writer.write("ours")
    assert last == ["ours"] * 3
