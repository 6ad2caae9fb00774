"""The counts of stored bytes, which are spread over rows so that writers do not wait for each other."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from mooring.control.tenants import projects, storage
from mooring.control.tenants.storage import StorageLimits
from mooring.db import migrate
from mooring.db.session import Database, Ending, at_end
from mooring.db.signals import Signals
from mooring.db.tables import Project
from mooring_client.errors import DailyWriteLimit, QuotaExceeded

LIMITS = StorageLimits(stored_bytes=1000, written_bytes_per_day=50_000)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    migrate.upgrade(database_url)
    made = Database(database_url, Signals())
    yield made
    made.dispose()


@pytest.fixture
def project(database: Database) -> Project:
    row = projects.new("p", {})
    with database.write() as session:
        session.add(row)
    return row


def add(session: Session, project: Project, *, stored: int, written: int = 0) -> None:
    storage.add(session, project.id, stored=stored, written=written, rows=0)
    storage.enforce(session, LIMITS)


@pytest.mark.both_databases
def test_the_limits_apply_to_the_sums(database: Database, project: Project) -> None:
    for _ in range(10):
        with database.write() as session:
            add(session, project, stored=100, written=5000)
    with pytest.raises(QuotaExceeded) as exceeded, database.write() as session:
        add(session, project, stored=1)
    assert exceeded.value.fields == {"quota": "stored_bytes", "limit": 1000, "used": 1000, "asked": 1}
    with pytest.raises(DailyWriteLimit), database.write() as session:
        add(session, project, stored=-1000, written=1)
    with database.write() as session:
        storage.subtract(session, {project.id: 900})
    for _ in range(9):
        with database.write() as session:
            add(session, project, stored=100)
    with pytest.raises(QuotaExceeded), database.write() as session:
        add(session, project, stored=1)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_writers_of_one_project_do_not_wait_for_each_other(database: Database, project: Project) -> None:
    def commit_another(_session: Session) -> None:
        for attempt in range(20):  # two writers that chose the same row do wait
            try:
                with database.write() as second:
                    second.execute(text("SET LOCAL lock_timeout = '50ms'"))
                    add(second, project, stored=1)
            except OperationalError:
                assert attempt < 19
            else:
                return

    with database.write() as first:
        add(first, project, stored=1)
        at_end(first, Ending.COUNTS, commit_another)
