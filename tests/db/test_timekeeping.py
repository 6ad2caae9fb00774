"""What the service clock is started from, and its record."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert
from typer.testing import CliRunner

from mooring.db import timekeeping
from mooring.db.clock import ServiceClock
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import Event
from mooring_client.cli.main import app

NOW_S = datetime(2026, 11, 24, tzinfo=UTC).timestamp()


class Machine:
    """The clocks of a machine, and its data directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wall_s, self.steady_s = NOW_S, 100.0

    def started(self, database: Database) -> ServiceClock:
        """Return the clock of a new process."""
        clock = ServiceClock(lambda: self.wall_s, lambda: self.steady_s)
        timekeeping.start(database, self.folder, clock)
        timekeeping.check(database, self.folder, clock)
        return clock

    def reboot(self) -> None:
        record = self.folder / timekeeping.RECORD_FILE
        record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": "an earlier one"}))
        self.steady_s = 5.0

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database(database_url, Signals())
    yield opened
    opened.dispose()


@pytest.mark.both_databases
def test_on_postgresql_the_databases_clock_is_used(database: Database, tmp_path: Path) -> None:
    """All replicas share it, and a replica with a wrong clock must not stop the instances of the others."""
    at = Machine(tmp_path).started(database).time()
    expected = NOW_S if database.is_sqlite else datetime.now(UTC).timestamp()
    assert at == pytest.approx(expected, abs=60)


def test_a_new_process_continues_after_a_jump(database: Database, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.started(database)
    machine.pass_time(60)
    machine.wall_s += 86_400
    assert machine.started(database).time() == NOW_S + 60


def test_after_a_reboot_a_plausible_clock_is_used(database: Database, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.started(database)
    machine.wall_s += 30 * 86_400
    machine.reboot()
    assert machine.started(database).time() == machine.wall_s


@pytest.mark.parametrize("jump", [timedelta(days=3650), timedelta(days=-1)])
def test_after_a_reboot_the_record_shows_that_the_clock_is_wrong(
    database: Database, tmp_path: Path, jump: timedelta
) -> None:
    machine = Machine(tmp_path)
    machine.started(database)
    machine.wall_s += jump.total_seconds()
    machine.reboot()
    assert machine.started(database).time() == NOW_S


def test_the_newest_event_shows_that_the_clock_is_wrong(database: Database, tmp_path: Path) -> None:
    """Also on a new machine, which has no record."""
    event = {"id": "evt_1", "type": "x", "at": datetime.fromtimestamp(NOW_S - 5, UTC), "data": {}}
    with database.write() as session:
        session.execute(insert(Event).values(**event))
    machine = Machine(tmp_path)
    machine.wall_s -= 86_400
    assert machine.started(database).time() == NOW_S - 5


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"boot_id": "x"}'])
def test_a_damaged_record_is_replaced(database: Database, tmp_path: Path, content: str) -> None:
    (tmp_path / timekeeping.RECORD_FILE).write_text(content)
    machine = Machine(tmp_path)
    assert machine.started(database).time() == NOW_S
    assert json.loads((tmp_path / timekeeping.RECORD_FILE).read_text())["at_s"] == NOW_S


def test_the_record_is_written_when_it_is_outdated(database: Database, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    clock = machine.started(database)
    record = tmp_path / timekeeping.RECORD_FILE
    first = record.read_text()
    machine.pass_time(600)
    timekeeping.check(database, tmp_path, clock)
    assert record.read_text() == first
    machine.pass_time(86_400)
    timekeeping.check(database, tmp_path, clock)
    assert record.read_text() != first


def test_an_operator_accepts_the_clock(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    machine.wall_s -= 86_400
    machine.started(database)
    monkeypatch.setenv("MOORING_DATA_DIR", str(tmp_path))
    ran = CliRunner().invoke(app, ["db", "accept-clock"])
    assert ran.exit_code == 0
    assert "restart" in ran.stdout
    clock = ServiceClock()
    timekeeping.start(database, tmp_path, clock)
    assert clock.time() == pytest.approx(datetime.now(UTC).timestamp(), abs=60)
