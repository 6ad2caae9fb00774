"""`mooring toolbox`: builds the toolbox of this node, and says what it did."""

from contextlib import closing
from typing import Final

import typer

from mooring.agent.docker.client import Engine
from mooring.agent.runtime import RuntimeUnavailable
from mooring.agent.toolbox import archive, build, programs

# An import of the files may take long on a slow disk.
_TIMEOUT_S: Final = 120


def toolbox() -> None:
    """Build this node's toolbox: sftp, scp and rsync for instances that start later; safe to repeat."""
    try:
        files = programs.collect()
        with closing(Engine(timeout_s=_TIMEOUT_S)) as engine:
            built = build.build(engine, files)
    except (programs.ToolboxError, RuntimeUnavailable, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    size_mib = len(archive.packed(files, "/")) / 2**20
    typer.echo(f"{built.volume}: {'built' if built.is_new else 'unchanged'}, {size_mib:.0f} MiB")
    for name in built.removed:
        typer.echo(f"{name}: removed")
    for name in built.kept:
        typer.echo(f"{name}: kept, as containers may have it; a later run of this command removes it")
    typer.echo("Instances that start from now on have it; others need a restart as new instances.")
