"""Runs the migrations so that a migration that is killed half-way changes nothing.

PostgreSQL: one transaction for each migration. SQLite (batch mode): one transaction for all migrations, which
also keeps a second process out.
"""

from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL

from mooring.db.session import normalized
from mooring.db.tables import Base
from mooring.db.types import EnumText, UtcDateTime
from mooring.settings import Settings


def _url() -> URL:
    given = context.config.attributes.get("url")
    return given if isinstance(given, URL) else normalized(Settings().resolved_database_url)


def _render_type(kind: str, item: Any, _context: Any) -> str | Literal[False]:
    # A migration must not change when the program's own types change, so it names SQLAlchemy's types.
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, EnumText):
        return "sa.String()"
    return False


def _make_ddl_transactional(engine: Engine) -> None:
    """Run CREATE TABLE within the transaction. Python's sqlite3 would commit each at once, so that a killed
    process would leave some of the tables.
    """

    @event.listens_for(engine, "connect")
    def _leave_transactions_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        # Takes effect in a file without tables. The file can then return pages of deleted rows (db/space.py).
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _migrate(connection: Connection) -> None:
    is_sqlite = connection.dialect.name == "sqlite"
    if not is_sqlite:
        # Two replicas that start together: the second waits, then finds nothing to do.
        connection.execute(text("SELECT pg_advisory_lock(hashtext('mooring.migrations'))"))
        # While a migration waits for a lock behind a long transaction, all later queries wait behind the
        # migration. Set after the advisory lock, because it would also limit the wait for the first replica.
        connection.execute(text("SET lock_timeout = '5s'"))
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=is_sqlite,
        transactional_ddl=True,
        transaction_per_migration=not is_sqlite,
        compare_type=True,
        render_item=_render_type,
    )
    with context.begin_transaction():
        context.run_migrations()


url = _url()
# On SQLite, a second process waits up to 60 s for the first.
engine = create_engine(url, connect_args={"timeout": 60} if url.get_backend_name() == "sqlite" else {})
if engine.dialect.name == "sqlite":
    _make_ddl_transactional(engine)
with engine.connect() as connection:
    _migrate(connection)
engine.dispose()
