"""`mooring db`: the schema of the database, backups, and roles."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.common import explained_problems, migration_url, read_settings

app = typer.Typer(help="Manage the database: schema, backups, roles.", no_args_is_help=True)


@app.command()
def upgrade(revision: Annotated[str, typer.Argument()] = "head") -> None:
    """Migrate the database to a revision; safe to repeat."""
    from mooring.db import migrate  # noqa: PLC0415

    with explained_problems():
        migrate.upgrade(migration_url(), revision)
        typer.echo(f"the database is at {_current()}")


@app.command()
def downgrade(revision: Annotated[str, typer.Argument(help="such as -1, or base")]) -> None:
    """Migrate back to a revision. Back up first: data of newer tables is lost."""
    from mooring.db import migrate  # noqa: PLC0415

    with explained_problems():
        migrate.downgrade(migration_url(), revision)
        typer.echo(f"the database is at {_current()}")


@app.command()
def backup(file: Annotated[Path, typer.Argument(help="the new file; an old one is replaced")]) -> None:
    """Write a checked backup of the database to a file, while servers run."""
    from mooring.cli import backup as backups  # noqa: PLC0415

    with explained_problems():
        backups.backup(file)


@app.command()
def restore(file: Annotated[Path, typer.Argument(help="made by `mooring db backup`")]) -> None:
    """Replace the database with a backup. Stop all servers first.

    SQLite: the old files are kept. PostgreSQL: the old tables are removed, in the same transaction.
    """
    from mooring.cli import backup as backups  # noqa: PLC0415

    with explained_problems():
        backups.restore(file)


@app.command()
def current() -> None:
    """Print the revision of the database, and the one that this program expects."""
    from mooring.db import migrate  # noqa: PLC0415

    typer.echo(f"the database is at {_current()}; this program expects {migrate.newest()}")


@app.command("accept-clock")
def accept_clock() -> None:
    """Accept this machine's clock after it was wrong. Restart the service afterwards.

    The service does not follow a clock that jumps: see "Clocks" in docs/operating.md. On PostgreSQL, run this
    on the machine of each replica, and restart all of them.
    """
    from mooring.db import timekeeping  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    at = timekeeping.accept_wall_clock(read_settings(Settings).data_dir)
    typer.echo(f"the service will continue from {at}; restart it now")


@app.command()
def grant(
    role: Annotated[str, typer.Argument(help="PostgreSQL role of the server")],
) -> None:
    """Grant a role what the server needs, without changes to the audit log; safe to repeat.

    Runs as the owner of the tables (MOORING_DATABASE_OWNER_URL). With MOORING_DATABASE_ROLE_PASSWORD it
    creates the role or sets its password.
    """
    from mooring.db import roles  # noqa: PLC0415

    try:
        roles.grant(migration_url(), role, os.environ.get("MOORING_DATABASE_ROLE_PASSWORD") or None)
    except roles.UnfitRole as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{role} can run the server; it can add to the audit log but not change it")


def _current() -> str:
    from sqlalchemy import create_engine  # noqa: PLC0415

    from mooring.db import migrate  # noqa: PLC0415
    from mooring.db.session import normalized  # noqa: PLC0415

    engine = create_engine(normalized(migration_url()))
    try:
        return migrate.current(engine) or "no revision"
    finally:
        engine.dispose()
