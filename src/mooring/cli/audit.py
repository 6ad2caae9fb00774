"""`mooring audit`: the audit log, straight from the database."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.cli.opened import known_audit_keys, open_database

if TYPE_CHECKING:
    from mooring.control.audit.verification import VerificationReport

app = typer.Typer(help="The audit log, straight from the database.", no_args_is_help=True)

_SHOWN = 20


@app.command()
def verify(
    head: Annotated[
        list[str], typer.Option(help="the hash of a head that was kept elsewhere; repeatable")
    ] = [],  # noqa: B006
    heads: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="a file of such heads")
    ] = None,
) -> None:
    """Verify every signature, chain and head; exit with 1 and what does not fit, if anything does not."""
    from mooring.control.audit import verification  # noqa: PLC0415

    kept = [*head, *_hashes_in(heads)]
    with open_database() as database:
        keys = known_audit_keys(database)
        with database.read() as session:
            report = verification.verify(session, keys, kept)
    for problem in report.problems[:_SHOWN]:
        typer.echo(f"broken: {problem}", err=True)
    if report.problems:
        typer.echo(f"broken: {len(report.problems)} problems in {report.rows} rows", err=True)
        raise typer.Exit(1)
    typer.echo(_told(report, len(kept)))


def _hashes_in(file: Path | None) -> Iterator[str]:
    from mooring.loops.audit_links import exported  # noqa: PLC0415

    yield from (one.hash for one in exported(file.read_text())) if file else ()


def _told(report: "VerificationReport", kept: int) -> str:
    unkeyed = f", {report.unkeyed} of them of older releases, without a key" if report.unkeyed else ""
    newest = report.newest_head or "none yet: the first is made within a minute"
    compared = f"{kept} kept heads are all there" if kept else "no kept head was compared (--head, --heads)"
    return (
        f"{report.rows} rows{unkeyed}, each as it was written; {report.links} in their chains, "
        f"{report.unlinked} not yet; {report.heads} heads, {compared}; the newest head is {newest}"
    )


@app.command()
def head() -> None:
    """Print the newest head as JSON. Keep it elsewhere: it shows later that nothing before it was cut off."""
    from mooring.control.audit import chains  # noqa: PLC0415

    with open_database() as database, database.read() as session:
        newest = chains.newest_head(session)
    if newest is None:
        typer.echo("there is no head yet; a running server makes one within a minute", err=True)
        raise typer.Exit(1)
    typer.echo(newest.line())


@app.command()
def export() -> None:
    """Print the whole log as JSON lines, oldest first."""
    from sqlalchemy import select  # noqa: PLC0415

    from mooring.api.routes.audit import some_lines  # noqa: PLC0415
    from mooring.db.tables import AuditEntry  # noqa: PLC0415

    with open_database() as database:
        text, after = some_lines(database, select(AuditEntry), 0)
        while text:
            typer.echo(text, nl=False)
            text, after = some_lines(database, select(AuditEntry), after)
