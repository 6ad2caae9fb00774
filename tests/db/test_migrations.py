"""Migrations on both databases: up, the same as the tables, down to nothing, up again, killed half-way."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, Inspector, create_engine, inspect

from mooring.db import migrate
from mooring.db.session import normalized
from mooring.db.tables import Base
from tests.testbed.postgres import PostgresCluster

VERSIONS = "alembic_version"
KILLED = -9

# Runs in a process of its own: dies, as by kill -9, before the n-th statement that changes the database.
UPGRADE_UNTIL_KILLED = """
import os, signal, sys
from sqlalchemy import Engine, event
from mooring.db import migrate

left = int(sys.argv[2])

@event.listens_for(Engine, "before_cursor_execute")
def die_in_time(_connection, _cursor, statement, *_):
    global left
    if statement.lstrip().split()[0] in {"CREATE", "ALTER", "INSERT", "UPDATE", "DROP"}:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

migrate.upgrade(sys.argv[1])
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'mooring.db'}"
        return
    cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
    url = cluster.create_database()
    yield url
    cluster.drop_database(url)


@pytest.fixture
def engine(empty_database: str) -> Iterator[Engine]:
    made = create_engine(normalized(empty_database))
    yield made
    made.dispose()


def tables(engine: Engine) -> set[str]:
    return set(inspect(engine).get_table_names()) - {VERSIONS}


def described(inspector: Inspector) -> dict[str, dict[str, Any]]:
    """All that the database knows of its tables, in an order of its own making."""
    return {
        table: {
            "columns": {column["name"]: _plain(column) for column in inspector.get_columns(table)},
            "primary key": _plain(inspector.get_pk_constraint(table)),
            "unique": _sorted(inspector.get_unique_constraints(table)),
            "foreign keys": _sorted(inspector.get_foreign_keys(table)),
            # `alembic check` compares no conditions, and one of them keeps a GPU from being given twice.
            "checks": _sorted(inspector.get_check_constraints(table)),
            "indexes": _sorted(inspector.get_indexes(table)),
        }
        for table in inspector.get_table_names()
        if table != VERSIONS
    }


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    # Types and conditions are objects that are equal to nothing but themselves.
    return {key: _plain(value) if isinstance(value, dict) else str(value) for key, value in facts.items()}


def _sorted(rows: Any) -> list[dict[str, Any]]:
    return sorted(map(_plain, rows), key=str)


def test_up_to_the_tables_down_to_nothing_and_up_again(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    assert migrate.current(engine) == migrate.newest()
    command.check(migrate.config(empty_database))

    migrate.downgrade(empty_database, "base")
    assert tables(engine) == set()
    assert migrate.current(engine) is None

    migrate.upgrade(empty_database)
    assert migrate.current(engine) == migrate.newest()
    assert tables(engine) == set(Base.metadata.tables)


def test_migrations_make_what_the_tables_say(empty_database: str, engine: Engine) -> None:
    Base.metadata.create_all(engine)
    wanted = described(inspect(engine))
    Base.metadata.drop_all(engine)

    migrate.upgrade(empty_database)
    assert described(inspect(engine)) == wanted


def test_to_migrate_again_changes_nothing(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    first = described(inspect(engine))
    migrate.upgrade(empty_database)
    assert described(inspect(engine)) == first


@pytest.mark.parametrize("statements", [0, 1, 5, 15, 24])
def test_an_upgrade_that_is_killed_half_way_is_finished_by_the_next(
    empty_database: str, engine: Engine, statements: int
) -> None:
    assert upgrade_until_killed(empty_database, statements) == KILLED
    assert migrate.current(engine) is None
    migrate.upgrade(empty_database)
    assert migrate.current(engine) == migrate.newest()
    command.check(migrate.config(empty_database))


def upgrade_until_killed(url: str, statements: int) -> int:
    argv = [sys.executable, "-c", UPGRADE_UNTIL_KILLED, url, str(statements)]
    return subprocess.run(argv, check=False, env={**os.environ, "MOORING_DATABASE_URL": url}).returncode


def test_two_that_start_together_both_find_the_newest_schema(empty_database: str, engine: Engine) -> None:
    program = "import sys; from mooring.db import migrate; migrate.upgrade(sys.argv[1])"
    racers = [subprocess.Popen([sys.executable, "-c", program, empty_database]) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert migrate.current(engine) == migrate.newest()
