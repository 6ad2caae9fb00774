"""Runs the migrations, each in a transaction of its own, on SQLite (batch mode) or PostgreSQL."""

from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import URL

from mooring.db.session import normalized
from mooring.db.tables import Base
from mooring.db.types import UtcDateTime, Word
from mooring.settings import Settings


def _url() -> URL:
    given = context.config.attributes.get("url")
    return given if isinstance(given, URL) else normalized(Settings().resolved_database_url)


def _render_type(kind: str, item: Any, _context: Any) -> str | bool:
    # A migration must not change when the program's own types do, so it names the plain ones.
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, Word):
        return "sa.String()"
    return False


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # A migration that waits behind a long transaction would make every later query wait behind it.
        connection.execute(text("SET lock_timeout = '5s'"))
        # Two replicas that start together: the second waits, then finds nothing to do.
        connection.execute(text("SELECT pg_advisory_lock(hashtext('mooring.migrations'))"))
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=True,
        compare_type=True,
        render_item=_render_type,
    )
    with context.begin_transaction():
        context.run_migrations()


engine = create_engine(_url())
with engine.connect() as connection:
    _migrate(connection)
engine.dispose()
