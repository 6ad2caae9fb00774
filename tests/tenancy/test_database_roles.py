"""Two PostgreSQL roles: the owner migrates; the serving role cannot change the audit log (R32)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import errors
from pydantic import SecretStr
from typer.testing import CliRunner

from mooring.db import migrate, roles
from mooring.loops.loop import Loop
from mooring.server import open_control_plane
from mooring_client.cli.main import app
from tests.nodes import status
from tests.service import RunningService, running, settings_for
from tests.tenancy.audit_logs import await_links, verified
from tests.tenancy.calls import CALLS, awaited_stream
from tests.tenancy.matrix import MATRIX
from tests.tenancy.tenants import Setup, setup_of
from tests.testbed.postgres import PostgresCluster

ROLE, PASSWORD = "mooring_server", "of-the-serving-role"
pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


def _as_role(url: str, role: str = ROLE) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{role}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()


def _command(url: str, *arguments: str, password: str = PASSWORD) -> tuple[int, str]:
    environment = {"MOORING_DATABASE_OWNER_URL": url, "MOORING_DATABASE_ROLE_PASSWORD": password}
    ended = CliRunner().invoke(app, arguments, env=environment)
    return ended.exit_code, ended.output


@pytest.fixture
def serving_url(database_url: str) -> str:
    status, printed = _command(database_url, "db", "grant", ROLE)
    assert (status, printed) == (
        0,
        f"{ROLE} can run the server; it can add to the audit log but not change it\n",
    )
    return _as_role(database_url)


FORBIDDEN = {
    "UPDATE {table} SET hash = 'x'": errors.InsufficientPrivilege,
    "DELETE FROM {table}": errors.InsufficientPrivilege,
    "TRUNCATE {table}": errors.InsufficientPrivilege,
    "DROP TABLE {table}": errors.InsufficientPrivilege,
    "ALTER TABLE {table} DISABLE TRIGGER ALL": errors.InsufficientPrivilege,
    "ALTER TABLE {table} RENAME TO gone": errors.InsufficientPrivilege,
    "ALTER TABLE {table} OWNER TO " + ROLE: errors.InsufficientPrivilege,
    "DROP TRIGGER {table}_append_only ON {table}": errors.InsufficientPrivilege,
    "CREATE TRIGGER x BEFORE INSERT ON {table} EXECUTE FUNCTION refuse_audit_log_change()": (
        errors.InsufficientPrivilege
    ),
    "CREATE RULE x AS ON INSERT TO {table} DO INSTEAD NOTHING": errors.InsufficientPrivilege,
    "GRANT DELETE ON {table} TO " + ROLE: None,  # PostgreSQL only warns, and grants nothing
    "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE": errors.InsufficientPrivilege,
}
FORBIDDEN_ON_THE_DATABASE = (
    "DROP FUNCTION refuse_audit_log_change() CASCADE",
    "CREATE OR REPLACE FUNCTION refuse_audit_log_change() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RETURN OLD; END $$",
    "SET session_replication_role = 'replica'",
    "SET ROLE mooring",
    "SET SESSION AUTHORIZATION mooring",
    "REASSIGN OWNED BY mooring TO " + ROLE,
    "ALTER ROLE " + ROLE + " SUPERUSER",
    "GRANT mooring TO " + ROLE,
    "CREATE ROLE another SUPERUSER",
    "CREATE TABLE public.audit_log_2 (x int)",
    "ALTER SCHEMA public RENAME TO gone",
    "UPDATE alembic_version SET version_num = '0001'",
    "SELECT setval('audit_log_seq_seq', 1)",
    "UPDATE pg_class SET relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)",
    "COPY audit_log TO PROGRAM 'cat'",
)


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statement.encode())


@pytest.mark.parametrize("table", roles.AUDIT_TABLES)
def test_the_serving_role_cannot_change_the_audit_log(
    database_url: str, serving_url: str, tmp_path: Path, table: str
) -> None:
    # As in older releases, a server with the owner's role has written rows.
    open_control_plane(settings_for(database_url, tmp_path)).database.dispose()
    for statement, refusal in FORBIDDEN.items():
        if refusal is None:
            _execute(serving_url, statement.format(table=table))
            continue
        with pytest.raises(refusal):
            _execute(serving_url, statement.format(table=table))
    # The GRANT above had no effect.
    with pytest.raises(errors.InsufficientPrivilege):
        _execute(serving_url, f"DELETE FROM {table}")


def test_the_serving_role_cannot_become_the_owner(database_url: str, serving_url: str) -> None:
    for statement in FORBIDDEN_ON_THE_DATABASE:
        with pytest.raises(errors.InsufficientPrivilege):
            _execute(serving_url, statement)


def test_the_owner_can_change_the_audit_log(database_url: str) -> None:
    """The attack of finding 11: the single role of older releases can do this."""
    _execute(database_url, "ALTER TABLE audit_log DISABLE TRIGGER ALL")
    _execute(database_url, "DELETE FROM audit_log")


@pytest.fixture
def setup(serving_url: str, database_url: str, tmp_path: Path) -> Iterator[Setup]:
    settings = settings_for(
        serving_url, tmp_path / "data", rate_limits="off", database_owner_url=SecretStr(database_url)
    )
    with (
        running(settings) as service,
        service.client as admin,
        setup_of(service, admin, tmp_path / "node") as made,
    ):
        yield made


def test_the_serving_role_runs_every_operation(setup: Setup) -> None:
    assert setup.service.plane.database.url.username == ROLE
    document = setup.admin.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _call(setup, operation["operationId"], method, path)
    _tick_all(setup.service)
    await_links(setup.service)
    assert verified(setup.service).problems == []


def _call(setup: Setup, operation: str, method: str, path: str) -> None:
    if operation == "bring_stream":
        with awaited_stream(setup) as stream_id:
            setup.wire.bring(stream_id, status(0))
        return
    caller = "node" if MATRIX[operation]["admin"] == 401 else "admin"
    client = setup.admin if caller == "admin" else setup.wire.http
    answer = CALLS[operation](setup, caller).send(client, method, path, Idempotency_Key=operation)
    assert answer.status_code == MATRIX[operation][caller], (operation, answer.text)
    if operation in {"cordon_node", "drain_node"}:
        setup.admin.post(f"/v1/nodes/{setup.wire.id}/uncordon")
    if operation == "open_node_session":
        setup.wire.open_session()


def _tick_all(service: RunningService) -> None:
    """Run every loop once, so that a rejected statement raises instead of being logged."""
    for part in service.service._parts:
        if isinstance(part, Loop):
            part.tick()


def test_a_migration_grants_new_tables_to_the_serving_role(
    database_url: str, serving_url: str, tmp_path: Path
) -> None:
    migrate.downgrade(database_url, "0004")
    settings = settings_for(serving_url, tmp_path, database_owner_url=SecretStr(database_url))
    with running(settings) as service, service.client as client:
        assert client.get("/readyz").status_code == 200
        await_links(service)


def test_a_server_without_the_owners_url_starts_on_a_migrated_database(
    serving_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(settings_for(serving_url, tmp_path)) as service:
        await_links(service)
    assert "may change the audit log" not in caplog.text


def test_a_server_that_serves_as_the_owner_logs_a_warning(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_control_plane(settings_for(database_url, tmp_path)).database.dispose()
    assert "the serving database role can change the audit log" in caplog.text


@pytest.fixture
def make_role(database_url: str) -> Iterator[Callable[[str], str]]:
    made = []

    def make(attributes: str) -> str:
        _execute(database_url, f"CREATE ROLE unfit {attributes} LOGIN PASSWORD '{PASSWORD}'")
        made.append("unfit")
        return "unfit"

    yield make
    for name in made:
        _execute(database_url, f"DROP OWNED BY {name}")
        _execute(database_url, f"DROP ROLE {name}")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("SUPERUSER", "a superuser"),
        ("CREATEROLE", "allowed to create roles"),
        ("REPLICATION", "allowed to replicate"),
        ("IN ROLE mooring", "a member of a role that may do more"),
        ("IN ROLE pg_write_all_data", "a member of a role that may do more"),
    ],
)
def test_a_role_that_could_change_the_audit_log_is_rejected(
    database_url: str, make_role: Callable[[str], str], attributes: str, expected: str
) -> None:
    status, printed = _command(database_url, "db", "grant", make_role(attributes), password="")
    assert status == 2
    assert expected in printed
    assert "could change the audit log" in printed


def test_a_role_that_owns_a_table_is_rejected(
    database_url: str, make_role: Callable[[str], str], postgres_cluster: PostgresCluster
) -> None:
    role = make_role("")
    _execute(database_url, f"ALTER TABLE audit_log OWNER TO {role}")
    status, printed = _command(database_url, "db", "grant", role, password="")
    assert (status, "an owner of tables" in printed) == (2, True)
    _execute(database_url, "ALTER TABLE audit_log OWNER TO mooring")


def test_an_unknown_role_and_the_owner_are_rejected(database_url: str) -> None:
    status, printed = _command(database_url, "db", "grant", "nobody", password="")
    assert (status, "there is no role nobody" in printed) == (2, True)
    assert _command(database_url, "db", "grant", "mooring", password="")[0] == 2
