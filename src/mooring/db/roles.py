"""PostgreSQL: the serving role, which can insert into the audit log but not change it (security rule R32).

The owner of a table can drop its triggers. So the owner migrates, and a different role serves.
"""

import logging
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from sqlalchemy import Engine, text

from mooring.db.postgresql import libpq_parameters
from mooring.db.session import normalized

log = logging.getLogger(__name__)

AUDIT_TABLES: Final = ("audit_log", "audit_links", "audit_heads")
_READ_ONLY: Final = ("alembic_version",)

# Why a role could get more privileges than `grant` gives it; empty if it cannot.
_UNFIT_BECAUSE: Final[LiteralString] = """
    SELECT array_remove(ARRAY[
        CASE WHEN rolsuper THEN 'a superuser' END,
        CASE WHEN rolcreaterole THEN 'allowed to create roles' END,
        CASE WHEN rolreplication THEN 'allowed to replicate' END,
        CASE WHEN EXISTS (
            SELECT 1 FROM pg_roles other
            WHERE other.rolname <> role.rolname AND pg_has_role(role.rolname, other.oid, 'MEMBER')
              AND (other.rolsuper OR other.rolcreaterole OR other.rolname = current_user
                   OR other.rolname IN ('pg_write_all_data', 'pg_execute_server_program',
                                        'pg_write_server_files', 'pg_database_owner'))
        ) THEN 'a member of a role that may do more' END,
        CASE WHEN EXISTS (
            SELECT 1 FROM pg_class WHERE relowner = role.oid AND relnamespace = 'public'::regnamespace
        ) OR EXISTS (
            SELECT 1 FROM pg_namespace WHERE nspowner = role.oid AND nspname = 'public'
        ) OR EXISTS (
            SELECT 1 FROM pg_database WHERE datdba = role.oid AND datname = current_database()
        ) THEN 'an owner of tables, of the schema or of the database' END
    ], NULL)
    FROM pg_roles role WHERE rolname = %s
"""
# Whether the current role can change the audit log.
_CAN_CHANGE: Final = """
    SELECT bool_or(has_table_privilege(oid, 'UPDATE') OR has_table_privilege(oid, 'DELETE')
                   OR has_table_privilege(oid, 'TRUNCATE') OR pg_has_role(relowner, 'MEMBER'))
    FROM pg_class WHERE relname = ANY (:tables) AND relnamespace = 'public'::regnamespace
"""


class UnfitRole(Exception):
    """No usable serving role: none, or one that could change the audit log regardless of its grants."""


def role_of(url: str) -> str:
    """The role in a database URL."""
    role = normalized(url).username
    if not role:
        raise UnfitRole("MOORING_DATABASE_OWNER_URL is set, so MOORING_DATABASE_URL must name a role")
    return role


def grant(owner_url: str, role: str, password: str | None = None) -> None:
    """Grant a role the privileges for serving, as the owner of the tables. Safe to repeat.

    Args:
        password: creates the role if it does not exist, otherwise sets its password.

    Raises:
        UnfitRole: no such role, no PostgreSQL, or the role could change the audit log regardless.
    """
    url = normalized(owner_url)
    if url.get_backend_name() != "postgresql":
        raise UnfitRole("only PostgreSQL has roles; anyone who can write an SQLite file can change all of it")
    with psycopg.connect(**libpq_parameters(url) | {"connect_timeout": 10}) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('mooring.migrations'))")
        if password is not None:
            _create_or_alter(connection, role, password)
        _require_fit(connection, role)
        for statement in _grants(connection, role):
            connection.execute(statement)


def _create_or_alter(connection: psycopg.Connection[tuple[str, ...]], role: str, password: str) -> None:
    known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone()
    # Hashed here, since the statement may appear in the server's log.
    hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
    action = sql.SQL("ALTER" if known else "CREATE")
    statement = sql.SQL("{} ROLE {} LOGIN PASSWORD {}")
    connection.execute(statement.format(action, sql.Identifier(role), sql.Literal(hashed.decode())))


def _require_fit(connection: psycopg.Connection[tuple[str, ...]], role: str) -> None:
    row = connection.execute(_UNFIT_BECAUSE, [role]).fetchone()
    if row is None:
        raise UnfitRole(f"there is no role {role}: CREATE ROLE {role} LOGIN PASSWORD '…'")
    if row[0]:
        raise UnfitRole(f"the role {role} is {' and '.join(row[0])}: it could change the audit log")


def _grants(connection: psycopg.Connection[tuple[str, ...]], role: str) -> list[sql.Composed]:
    """REVOKE statements for all earlier grants on tables, then the GRANT statements."""
    to, tables = sql.Identifier(role), _tables(connection)
    database = sql.Identifier(connection.info.dbname)
    statements = [
        sql.SQL("REVOKE CREATE ON SCHEMA public FROM PUBLIC, {}").format(to),
        sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(to),
        sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(database, to),
        sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC, {}").format(to),
        sql.SQL("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {}").format(to),
    ]
    for table in tables:
        if table in AUDIT_TABLES:
            rights = "SELECT, INSERT"
        elif table in _READ_ONLY:
            rights = "SELECT"
        else:
            rights = "SELECT, INSERT, UPDATE, DELETE"
        statement = sql.SQL("GRANT {} ON {} TO {}")
        statements.append(statement.format(sql.SQL(rights), sql.Identifier("public", table), to))
    return statements


def _tables(connection: psycopg.Connection[tuple[str, ...]]) -> list[str]:
    found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    return [row[0] for row in found]


def warn_of_serving_role(engine: Engine) -> None:
    """Log a warning at startup if the serving role could change the audit log."""
    if engine.dialect.name != "postgresql":
        return
    with engine.connect() as connection:
        can_change = connection.scalar(text(_CAN_CHANGE), {"tables": list(AUDIT_TABLES)})
    if can_change:
        log.warning(
            'the serving database role can change the audit log: see docs/operating.md, "Two database roles"'
        )
