"""What several commands need: the settings, the database, and the keys of the audit log."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from mooring.control.audit.signing_keys import AuditKeys
    from mooring.db.session import Database
    from mooring.settings import Settings

Loaded = TypeVar("Loaded")
# A restart does not help: let systemd not try (RestartPreventExitStatus).
EXIT_DAMAGED: Final = 6

# As in services.py, functions import what they run: an agent must not load the control plane into memory.


def _settings_with_private_files() -> "Settings":
    """Read the settings; make the data directory and a SQLite file unreadable for other users."""
    from mooring.db import space  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    space.make_private(settings.data_dir, settings.resolved_database_url)
    return settings


@contextmanager
def open_database() -> "Iterator[Database]":
    """Open the database, or exit if it is not migrated. Only a server creates one: it shows the admin key."""
    from mooring.db import migrate, timekeeping  # noqa: PLC0415
    from mooring.db.session import Database  # noqa: PLC0415
    from mooring.db.signals import Signals  # noqa: PLC0415

    with explained_problems():
        settings = _settings_with_private_files()
        opened = Database(settings.resolved_database_url, Signals())
        try:
            if migrate.current(opened.engine) != migrate.newest():
                typer.echo(
                    "the database does not have this program's revision; start the server first", err=True
                )
                raise typer.Exit(1)
            timekeeping.start(opened, settings.data_dir)
            yield opened
        finally:
            opened.dispose()


@contextmanager
def explained_problems() -> Iterator[None]:
    """Turn errors of the database as a whole into one line and an exit status.

    EXIT_DAMAGED if only a restore helps, otherwise 1: the next start may succeed.
    """
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    from mooring.db import failures  # noqa: PLC0415
    from mooring.db.operator_errors import DamagedDatabase, DatabaseProblem  # noqa: PLC0415

    try:
        yield
    except DamagedDatabase as problem:
        typer.echo(f'{problem}. See docs/operating.md, "Backup and restore"', err=True)
        raise typer.Exit(EXIT_DAMAGED) from None
    except DatabaseProblem as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"cannot use a file: {error}", err=True)
        raise typer.Exit(1) from None
    except (sqlite3.Error, DBAPIError) as error:
        if isinstance(error, DBAPIError) and not failures.is_unavailable(error):
            raise
        cause = error.orig if isinstance(error, DBAPIError) else error
        typer.echo(f"cannot use the database: {cause}", err=True)
        raise typer.Exit(EXIT_DAMAGED if failures.is_damage(cause) else 1) from None


def migration_url() -> str:
    """The database URL with the role that owns the tables."""
    return _settings_with_private_files().migration_url


def read_audit_keys(database: "Database") -> "AuditKeys":
    """Read the server's audit keys, or exit and say where they should be."""
    from mooring.control.audit import audit_log  # noqa: PLC0415
    from mooring.control.audit.signing_keys import KEY_FILE, AuditKeys, WrongAuditKey  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    # Never created here: a new key would not be the server's.
    file = settings.data_dir / KEY_FILE
    if settings.audit_keys:
        found = settings.audit_keys.get_secret_value().split(",")
    else:
        found = file.read_text().split() if file.exists() else []
    try:
        with database.read() as session:
            return audit_log.require_known(session, AuditKeys(found) if found else None)
    except WrongAuditKey as error:
        typer.echo(f"MOORING_AUDIT_KEYS: {error}", err=True)
        raise typer.Exit(2) from None


def sign_with_audit_keys(database: "Database") -> None:
    """Sign the audit rows of this command with the server's keys."""
    from mooring.control.audit import audit_log  # noqa: PLC0415

    audit_log.sign_with(database, read_audit_keys(database))


def read_settings(load: Callable[[], Loaded]) -> Loaded:
    """Read settings from the environment, or exit and name each invalid setting."""
    try:
        return load()
    except ValidationError as error:
        for item in error.errors():
            name = "_".join(str(part) for part in item["loc"])
            prefix = f"MOORING_{name.upper()}: " if name else ""
            typer.echo(f"{prefix}{item['msg'].removeprefix('Value error, ')}", err=True)
        raise typer.Exit(2) from None
