"""/readyz tells whether the database accepts writes, within a few seconds in every case."""

import secrets
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from mooring.db import migrate
from mooring.db.readiness import FULL_S, KEPT_S
from tests.problems import problem
from tests.service import RunningService, running, settings_for
from tests.testbed.filesystems import fill, small_file_system, take_all_space
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until

READY_WITHIN_S = 5


def test_a_full_disk_is_not_ready(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 20) as disk:
        url = f"sqlite:///{disk / 'data' / 'mooring.db'}"
        with running(settings_for(url, disk / "data")) as service, service.client as client:
            assert client.get("/readyz").status_code == 200
            with closing(sqlite3.connect(disk / "data" / "mooring.db", isolation_level=None)) as other:
                # A log with room could still be written, and a reader prevents that it begins again.
                wait_until(lambda: other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
                other.execute("BEGIN")
                other.execute("SELECT count(*) FROM nodes").fetchone()
                fill(disk / "filling")
                wait_until(lambda: client.get("/readyz").status_code == 503)
                problem(client.get("/readyz"), 503, "database_unavailable")
                assert client.get("/v1/instances").status_code == 200
            (disk / "filling").unlink()
            wait_until(lambda: client.get("/readyz").status_code == 200)


def test_a_postgresql_without_space_is_not_ready(
    new_postgres_cluster: NewPostgresCluster, tmp_path: Path
) -> None:
    """Small changes still work then: they fit into pages that the server has."""
    cluster = new_postgres_cluster(durable=False, disk_mib=400)
    url = cluster.create_database()
    migrate.upgrade(url)
    body = {"image": "a", "env": {"LARGE": secrets.token_hex(10_000)}}
    with running(settings_for(url, tmp_path)) as service, service.client as client:
        take_all_space(cluster.data / "filling")
        rejected = wait_until(lambda: rejection(client.post("/v1/instances", json=body)))
        problem(rejected, 503, "database_unavailable")
        wait_until(lambda: is_writable(service))
        problem(client.get("/readyz"), 503, "database_unavailable")
        assert client.get("/v1/instances").status_code == 200
        (cluster.data / "filling").unlink()
        assert wait_until(lambda: client.get("/readyz").status_code == 200, 2 * FULL_S)
        assert client.post("/v1/instances", json=body).status_code == 201


def is_writable(service: RunningService) -> bool:
    """A page may be full of old versions of the row, until the server prunes them."""
    try:
        service.plane.database.require_writable()
    except OperationalError:
        return False
    return True


def rejection(answer: httpx.Response) -> httpx.Response | None:
    return answer if answer.status_code != 201 else None


@pytest.fixture
def cluster(new_postgres_cluster: NewPostgresCluster) -> PostgresCluster:
    return new_postgres_cluster(durable=False)


def test_a_read_only_database_is_not_ready(cluster: PostgresCluster, tmp_path: Path) -> None:
    url = cluster.create_database()
    migrate.upgrade(url)
    with running(settings_for(url, tmp_path)) as service, service.client as client:
        assert client.get("/readyz").status_code == 200
        _alter_system(cluster, "on")
        wait_until(lambda: client.get("/readyz").status_code == 503)
        problem(client.get("/readyz"), 503, "database_unavailable")
        document = problem(client.post("/v1/instances", json={"image": "a"}), 503, "database_unavailable")
        assert document["retryable"]
        assert client.get("/v1/instances").status_code == 200
        _alter_system(cluster, "off")
        wait_until(lambda: client.get("/readyz").status_code == 200)


def _alter_system(cluster: PostgresCluster, read_only: str) -> None:
    with psycopg.connect(cluster.url(), autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {read_only}")
        connection.execute("SELECT pg_reload_conf()")


def test_a_frozen_database_is_not_ready(cluster: PostgresCluster, tmp_path: Path) -> None:
    url = cluster.create_database()
    migrate.upgrade(url)
    with running(settings_for(url, tmp_path)) as service, service.client as client:
        assert client.get("/readyz").status_code == 200
        cluster.freeze()
        try:
            began = time.monotonic()
            answers = [client.get("/readyz") for _ in range(2)]
            took_s = time.monotonic() - began
        finally:
            cluster.thaw()
        for answer in answers:
            problem(answer, 503, "database_unavailable")
        assert took_s < 2 * READY_WITHIN_S
        wait_until(lambda: client.get("/readyz").status_code == 200, 20)


def test_a_locked_database_is_not_ready(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    with running(settings_for(url, tmp_path / "data")) as service, service.client as client:
        assert client.get("/readyz").status_code == 200
        with closing(sqlite3.connect(tmp_path / "mooring.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            wait_until(lambda: client.get("/readyz").status_code == 503)
            other.execute("ROLLBACK")
        wait_until(lambda: client.get("/readyz").status_code == 200)


def test_checks_share_one_write(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    with running(settings_for(url, tmp_path / "data")) as service, service.client as client:
        assert client.get("/readyz").status_code == 200
        versions = set()
        began = time.monotonic()
        with closing(sqlite3.connect(tmp_path / "mooring.db")) as other:
            for _ in range(50):
                assert client.get("/readyz").status_code == 200
                versions.add(other.execute("PRAGMA data_version").fetchone())
        # Each commit is a version. The loops of the service may add some.
        assert len(versions) <= 10 + (time.monotonic() - began) / KEPT_S
