"""Migrations on both databases: upgrade, downgrade, comparison with the models, and interruption."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, Inspector, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from mooring.db import migrate
from mooring.db.session import normalized
from mooring.db.tables import Base
from tests.testbed.postgres import PostgresCluster

pytestmark = pytest.mark.both_databases

VERSIONS = "alembic_version"
KILLED = -9

# Runs in its own process, and kills that process after n statements that change the database.
UPGRADE_UNTIL_KILLED = """
import os, signal, sys
from sqlalchemy import Engine, event
from mooring.db import migrate

left = int(sys.argv[2])

@event.listens_for(Engine, "before_cursor_execute")
def kill_after_n_statements(_connection, _cursor, statement, *_):
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
    """Columns, constraints and indexes of all tables, as the database describes them."""
    return {
        table: {
            "columns": {column["name"]: _plain(column) for column in inspector.get_columns(table)},
            "primary key": _plain(inspector.get_pk_constraint(table)),
            "unique": _sorted(inspector.get_unique_constraints(table)),
            "foreign keys": _sorted(inspector.get_foreign_keys(table)),
            # `alembic check` ignores check constraints, and one of them prevents double allocation.
            "checks": _sorted(inspector.get_check_constraints(table)),
            "indexes": _sorted(inspector.get_indexes(table)),
        }
        for table in inspector.get_table_names()
        if table != VERSIONS
    }


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    # Types and conditions have no useful equality, so compare their text.
    return {key: _plain(value) if isinstance(value, dict) else str(value) for key, value in facts.items()}


def _sorted(rows: Any) -> list[dict[str, Any]]:
    return sorted(map(_plain, rows), key=str)


def test_migrations_upgrade_downgrade_and_upgrade_again(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    assert migrate.current(engine) == migrate.newest()
    command.check(migrate.config(empty_database))

    migrate.downgrade(empty_database, "base")
    assert tables(engine) == set()
    assert migrate.current(engine) is None

    migrate.upgrade(empty_database)
    assert migrate.current(engine) == migrate.newest()
    assert tables(engine) == set(Base.metadata.tables)


def test_migrations_create_the_schema_of_the_models(empty_database: str, engine: Engine) -> None:
    Base.metadata.create_all(engine)
    wanted = described(inspect(engine))
    Base.metadata.drop_all(engine)

    migrate.upgrade(empty_database)
    assert described(inspect(engine)) == wanted


def test_a_second_upgrade_changes_nothing(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    first = described(inspect(engine))
    migrate.upgrade(empty_database)
    assert described(inspect(engine)) == first


@pytest.mark.parametrize("statements", [0, 1, 5, 15, 24])
def test_the_next_upgrade_completes_a_killed_one(
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


def test_concurrent_upgrades_both_succeed(empty_database: str, engine: Engine) -> None:
    program = "import sys; from mooring.db import migrate; migrate.upgrade(sys.argv[1])"
    racers = [subprocess.Popen([sys.executable, "-c", program, empty_database]) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert migrate.current(engine) == migrate.newest()


GROWTH, BEFORE_GROWTH = "0008", "0007"
BEFORE_STRIPES = "0010"


def test_an_upgrade_counts_the_stored_bytes_of_existing_rows(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database, BEFORE_GROWTH)
    with engine.begin() as connection:
        connection.execute(text(PROJECT))
        connection.execute(text(GROUP), {"template": json.dumps(TEMPLATE)})
        connection.execute(text(MEMBER), {"spec": json.dumps(TEMPLATE)})
        connection.execute(
            text(
                "INSERT INTO idempotency_keys (caller, key, fingerprint, status, sealed, body, created_at)"
                " VALUES ('key_1', 'k', 'f', 200, false, :body, '2026-11-21 00:00:00')"
            ),
            {"body": b"x" * 1000},
        )
    migrate.upgrade(empty_database)
    with engine.begin() as connection:
        stored = connection.execute(text("SELECT project_id, stored_bytes FROM project_storage")).all()
        answers = connection.execute(text("SELECT holder, stored_bytes FROM idempotency_usage")).all()
    assert [tuple(row) for row in stored] == [("prj_1", 2 * (len(json.dumps(TEMPLATE)) + len("{}")))]
    assert [tuple(row) for row in answers] == [("key_1", 1000)]


def test_a_downgrade_restores_member_specs_and_the_check_against_double_allocation(
    empty_database: str, engine: Engine
) -> None:
    migrate.upgrade(empty_database, GROWTH)
    own = {"image": "a", "priority": 7}
    with engine.begin() as connection:
        connection.execute(text(PROJECT))
        connection.execute(text(GROUP), {"template": json.dumps(TEMPLATE)})
        connection.execute(text(MEMBER), {"spec": json.dumps(own)})
    migrate.downgrade(empty_database, BEFORE_GROWTH)
    with engine.begin() as connection:
        spec = connection.scalar(text("SELECT spec FROM instances"))
        connection.execute(text(NODE))
        connection.execute(text(GPU))
        connection.execute(text(ALLOCATION), {"instance": "ins_1"})
        assert connection.scalar(text("SELECT milli_held FROM gpus")) == 1000
    spec = json.loads(spec) if isinstance(spec, str) else spec
    assert spec == {**TEMPLATE, **own}
    with pytest.raises(DBAPIError, match="held"), engine.begin() as connection:
        connection.execute(text(ALLOCATION), {"instance": "ins_1"})


def test_triggers_prevent_double_allocation_after_the_upgrade(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    with engine.begin() as connection:
        for statement in (NEWEST_PROJECT, NODE, GPU):
            connection.execute(text(statement))
        connection.execute(text(ALLOCATION), {"instance": "ins_purged"})
    with pytest.raises(DBAPIError, match="held"), engine.begin() as connection:
        connection.execute(text(ALLOCATION), {"instance": "ins_purged"})
    with engine.begin() as connection:
        connection.execute(text("UPDATE allocations SET to_at = '2026-11-22 00:00:00'"))
        assert connection.scalar(text("SELECT milli_held FROM gpus")) == 0


def test_a_downgrade_adds_up_the_stripes_of_stored_bytes(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database)
    rows = [(3, 50, 7, "2026-11-23"), (5, -20, 2, "2026-11-24"), (9, 1, 4, "2026-11-24")]
    with engine.begin() as connection:
        connection.execute(text(NEWEST_PROJECT))
        for stripe, stored, written, day in rows:
            connection.execute(
                text("INSERT INTO project_storage VALUES ('prj_1', :stored, :written, :day, :stripe)"),
                {"stripe": stripe, "stored": stored, "written": written, "day": day},
            )
    migrate.downgrade(empty_database, BEFORE_STRIPES)
    with engine.begin() as connection:
        counts = connection.execute(
            text("SELECT project_id, stored_bytes, written_bytes, written_on FROM project_storage")
        )
        assert [tuple(row) for row in counts] == [("prj_1", 31, 6, "2026-11-24")]


def test_an_upgrade_records_which_events_retention_has_deleted(empty_database: str, engine: Engine) -> None:
    migrate.upgrade(empty_database, BEFORE_STRIPES)
    with engine.begin() as connection:
        connection.execute(text(CONTROL_PLANE), {"secret": b"x"})
        for seq in (7, 9):
            connection.execute(text(EVENT), {"seq": seq})
    migrate.upgrade(empty_database)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT events_purged_to FROM control_plane")) == 6


TEMPLATE = {
    "image": "a", "env": {"A": "1"}, "command": ["b"], "entrypoint": None, "working_dir": "/w", "user": None,
    "ports": [], "priority": 50,
}  # fmt: skip
PROJECT = """
    INSERT INTO projects (id, name, labels, quotas, weight, security_profile, gpu_sharing, host_network,
        local_images, version, created_at)
    VALUES ('prj_1', 'p', '{}', '{}', 1, 'standard', false, false, false, 1, '2026-11-21 00:00:00')
"""
NEWEST_PROJECT = PROJECT.replace("local_images,", "local_images, require_disk_limits,").replace(
    "false, 1,", "false, false, 1,"
)
CONTROL_PLANE = """
    INSERT INTO control_plane (id, cursor_secret, events_purged_to, created_at)
    VALUES ('cp_1', :secret, 2, '2026-11-21 00:00:00')
"""
EVENT = """
    INSERT INTO events (seq, id, type, at, data) VALUES (:seq, 'evt', 't', '2026-11-21 00:00:00', '{}')
"""
GROUP = """
    INSERT INTO instance_groups (id, project_id, name, labels, count, template, on_member_failure, network,
        encrypted, master_port, restarts, desired_state, version, created_at)
    VALUES ('grp_1', 'prj_1', 'g', '{}', 1, :template, 'stop_all', 'auto', false, 1, 0, 'running', 1,
        '2026-11-21 00:00:00')
"""
MEMBER = """
    INSERT INTO instances (id, project_id, name, labels, spec, gpu_count, gpu_milli, priority, group_id,
        group_rank, state, desired_state, version, generation, attempt, node_generation, requeue,
        stop_timeout_s, endpoints, simulated, handout_count, created_at, queued_at)
    VALUES ('ins_1', 'prj_1', 'i', '{}', :spec, 1, 1000, 50, 'grp_1', 0, 'pending', 'running', 1, 1, 0, 0,
        false, 10, '[]', false, 0, '2026-11-21 00:00:00', '2026-11-21 00:00:00')
"""
NODE = """
    INSERT INTO nodes (id, name, credential_hash, renewal_due, cordoned, draining, silent, samples, orphans,
        session, seq, generation, revision, heartbeats, version, created_at)
    VALUES ('nod_1', 'n', 'h', false, false, false, false, '[]', '[]', 0, 0, 0, 0, 0, 1,
        '2026-11-21 00:00:00')
"""
GPU = """
    INSERT INTO gpus (uuid, node_id, index, model, memory_mib, facts, health, simulated, milli_held)
    VALUES ('GPU-1', 'nod_1', 0, 'H100', 1, '{}', 'healthy', false, 0)
""".replace("index", '"index"')
ALLOCATION = """
    INSERT INTO allocations (gpu_uuid, instance_id, project_id, attempt, milli, from_at)
    VALUES ('GPU-1', :instance, 'prj_1', 1, 1000, '2026-11-21 00:00:00')
"""
