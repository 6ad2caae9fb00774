"""`mooring audit`: reads the audit log directly from the database."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.cli.common import open_database, read_audit_keys

if TYPE_CHECKING:
    from mooring.control.audit.verification import VerificationReport

app = typer.Typer(help="Read the audit log directly from the database.", no_args_is_help=True)

_MAX_SHOWN = 20


@app.command()
def verify(
    head: Annotated[list[str], typer.Option(help="hash of a head stored elsewhere; repeatable")] = [],  # noqa: B006
    heads: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="file of stored heads")
    ] = None,
) -> None:
    """Verify all signatures, chains and heads. If there are problems, list the first 20 and exit with 1."""
    from mooring.control.audit import verification  # noqa: PLC0415

    stored_heads = [*head, *_hashes_in(heads)]
    with open_database() as database:
        keys = read_audit_keys(database)
        with database.read() as session:
            report = verification.verify(session, keys, stored_heads)
    for problem in report.problems[:_MAX_SHOWN]:
        typer.echo(f"broken: {problem}", err=True)
    if report.problems:
        typer.echo(f"broken: {len(report.problems)} problems in {report.rows} rows", err=True)
        raise typer.Exit(1)
    typer.echo(_summary(report, len(stored_heads)))


def _hashes_in(file: Path | None) -> Iterator[str]:
    from mooring.loops.audit_links import heads_in  # noqa: PLC0415

    yield from (stored.hash for stored in heads_in(file.read_text())) if file else ()


def _summary(report: "VerificationReport", compared: int) -> str:
    unkeyed = f" ({report.unkeyed} of older releases, without a key)" if report.unkeyed else ""
    newest = report.newest_head or "none yet: a running server makes one within a minute"
    stored = f"all {compared} stored heads found" if compared else "no stored heads given (--head, --heads)"
    return (
        f"{report.rows} rows unchanged{unkeyed}; {report.links} in chains, {report.unlinked} not yet; "
        f"{report.heads} heads, {stored}; newest head: {newest}"
    )


@app.command()
def head() -> None:
    """Print the newest head as JSON. Store it elsewhere to detect later that the log was truncated."""
    from mooring.control.audit import chains  # noqa: PLC0415

    with open_database() as database, database.read() as session:
        newest = chains.newest_head(session)
    if newest is None:
        typer.echo("no head yet; a running server makes one within a minute", err=True)
        raise typer.Exit(1)
    typer.echo(newest.line())


@app.command()
def export() -> None:
    """Print the whole audit log as JSON lines, oldest first."""
    from sqlalchemy import select  # noqa: PLC0415

    from mooring.api.routes.audit import some_lines  # noqa: PLC0415
    from mooring.db.tables import AuditEntry  # noqa: PLC0415

    with open_database() as database:
        text, after = some_lines(database, select(AuditEntry), 0)
        while text:
            typer.echo(text, nl=False)
            text, after = some_lines(database, select(AuditEntry), after)
