"""Runs Alembic from the program. The migrations are part of the wheel."""

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine

from mooring.db.file_lock import file_of, in_use
from mooring.db.session import normalized


def config(url: str) -> Config:
    """Alembic's configuration for this database, wherever the package is installed."""
    made = _without_database()
    made.attributes["url"] = normalized(url)
    return made


def upgrade(url: str, revision: str = "head") -> None:
    """Raises DatabaseProblem: a restore has begun and not ended. So does `downgrade`."""
    with in_use(file_of(normalized(url))):
        command.upgrade(config(url), revision)


def downgrade(url: str, revision: str) -> None:
    with in_use(file_of(normalized(url))):
        command.downgrade(config(url), revision)


def current(engine: Engine) -> str | None:
    """The database's revision; None if it was never migrated."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_newest(url: str) -> bool:
    """Whether the database is at the revision that this program expects."""
    engine = create_engine(normalized(url))
    try:
        return current(engine) == newest()
    finally:
        engine.dispose()


@cache
def known() -> frozenset[str]:
    """All revisions that this program can upgrade."""
    return frozenset(each.revision for each in _scripts().walk_revisions())


@cache
def newest() -> str | None:
    """The revision that this program expects."""
    return _scripts().get_current_head()


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_without_database())


def _without_database() -> Config:
    installed = Path(__file__).parents[1] / "migrations"
    in_checkout = Path(__file__).parents[3] / "migrations"  # of an editable install
    made = Config()
    made.set_main_option("script_location", str(installed if installed.is_dir() else in_checkout))
    return made
