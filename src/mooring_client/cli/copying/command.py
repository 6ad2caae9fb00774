"""`mooring cp`: files to and from an instance, as a tar archive through the stream of a command."""

import re
from typing import Annotated, Final

import typer

from mooring_client.cli.copying.downloading import Download
from mooring_client.cli.copying.report import Report
from mooring_client.cli.copying.uploading import Upload
from mooring_client.cli.exits import Exit
from mooring_client.cli.session import connect, find_instance

_REMOTE: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*):(.+)", re.DOTALL)


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="-: a tar archive from stdin")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="-: a tar archive to stdout")],
    follow_links: Annotated[
        bool, typer.Option("--follow-links", "-L", help="copy what links lead to, not the links")
    ] = False,
) -> None:
    """Copy files from or to a running instance: either SRC or DST is INSTANCE:PATH.

    A folder is copied into DST if DST exists, and as DST if not; SRC/. is the content of a folder. A path in
    an instance begins at its working folder. ./a:b is a local file with a colon in its name.

    Permissions, times and links are kept. From an instance, special files and links that lead out of the
    copied folder are left out; the exit code is then 1.

    mooring cp train-1:/data/model.pt .
    """
    found, to = _REMOTE.fullmatch(source), _REMOTE.fullmatch(destination)
    if (found is None) == (to is None):
        raise typer.BadParameter("either SRC or DST must be INSTANCE:PATH, and the other a local path or -")
    report = Report()
    with connect() as client, report:
        if found:
            instance = find_instance(client, found[1])["id"]
            Download(client, instance, report, follow_links=follow_links).run(found[2], destination)
        elif to:
            instance = find_instance(client, to[1])["id"]
            Upload(client, instance, report, follow_links=follow_links).run(source, to[2])
    if report.left_out:
        raise typer.Exit(Exit.ERROR)
