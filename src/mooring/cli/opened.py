"""What commands open: the settings, the database as a server left it, and the keys of its audit log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from mooring.control.audit.signing_keys import AuditKeys
    from mooring.db.session import Database
    from mooring.settings import Settings

Loaded = TypeVar("Loaded")

# As in main.py, each imports what it runs: an agent must not carry the control plane in its memory.


def _serving_url() -> str:
    return _settings_with_private_files().resolved_database_url


def _settings_with_private_files() -> "Settings":
    """Nobody else on this machine reads the data directory or a database that is a file there."""
    from mooring.db import space  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    space.make_private(settings.data_dir, settings.resolved_database_url)
    return settings


@contextmanager
def open_database() -> "Iterator[Database]":
    """A database that a server has migrated before; making one is the server's, which shows its admin key."""
    from mooring.db import migrate  # noqa: PLC0415
    from mooring.db.session import Database  # noqa: PLC0415
    from mooring.db.signals import Signals  # noqa: PLC0415

    opened = Database(_serving_url(), Signals())
    try:
        if migrate.current(opened.engine) != migrate.newest():
            typer.echo("the database is not at this program's revision; start the server first", err=True)
            raise typer.Exit(1)
        yield opened
    finally:
        opened.dispose()


def migration_url() -> str:
    """The database, as the role that owns its tables."""
    return _settings_with_private_files().migration_url


def known_audit_keys(database: "Database") -> "AuditKeys":
    """The server's keys of the audit log, or an exit that says where they should be."""
    from mooring.control.audit import audit_log  # noqa: PLC0415
    from mooring.control.audit.signing_keys import KEY_FILE, AuditKeys, WrongAuditKey  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    # Never made here: a new key would not be the server's.
    file, given = settings.data_dir / KEY_FILE, settings.audit_keys
    found = (
        given.get_secret_value().split(",") if given else file.read_text().split() if file.exists() else []
    )
    try:
        with database.read() as session:
            return audit_log.require_known(session, AuditKeys(found) if found else None)
    except WrongAuditKey as error:
        typer.echo(f"MOORING_AUDIT_KEYS: {error}", err=True)
        raise typer.Exit(2) from None


def sign_with_audit_keys(database: "Database") -> None:
    """What this command records is signed as the server signs it."""
    from mooring.control.audit import audit_log  # noqa: PLC0415

    audit_log.sign_with(database, known_audit_keys(database))


def read_settings(load: Callable[[], Loaded]) -> Loaded:
    """Settings from the environment, or an exit that names each that is wrong."""
    try:
        return load()
    except ValidationError as error:
        for item in error.errors():
            name = "_".join(str(part) for part in item["loc"])
            prefix = f"MOORING_{name.upper()}: " if name else ""
            typer.echo(f"{prefix}{item['msg'].removeprefix('Value error, ')}", err=True)
        raise typer.Exit(2) from None
