"""`-f` of `mooring apply` and `mooring diff`: files, folders and the input of the command."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from mooring_client.cli.exits import Exit
from mooring_client.cli.session import say
from mooring_client.manifests.documents import MAX_BYTES, BadDocument, Document, read
from mooring_client.manifests.kinds import Manifest, manifests_of

_SUFFIXES: Final = frozenset({".yaml", ".yml"})
_MOST_PROBLEMS: Final = 20

FilesOption = Annotated[
    list[str],
    typer.Option(
        "--filename", "-f", help="a file, a folder with .yaml and .yml files, or - for stdin; may be repeated"
    ),
]


def manifests_in(files: Sequence[str]) -> list[Manifest]:
    """The resources of all files, in the order to apply them.

    Raises:
        typer.Exit: a file cannot be read, or something in it is wrong; nothing should be applied then.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for name in _names(files, problems):
        try:
            documents += read(_content(name), "stdin" if name == "-" else name)
        except (BadDocument, OSError) as error:
            problems.append(str(error))
    found, wrong = manifests_of(documents)
    problems += wrong
    if not found and not problems:
        problems.append("there is no resource in these files")
    if problems:
        for problem in problems[:_MOST_PROBLEMS]:
            say(f"mooring: {problem}")
        if len(problems) > _MOST_PROBLEMS:
            say(f"mooring: and {len(problems) - _MOST_PROBLEMS} more")
        raise typer.Exit(Exit.USAGE)
    return found


def _names(given: Iterable[str], problems: list[str]) -> Iterator[str]:
    for name in given:
        folder = Path(name)
        if name == "-" or not folder.is_dir():
            yield name
            continue
        files = sorted(each for each in folder.iterdir() if each.suffix in _SUFFIXES and each.is_file())
        if not files:
            problems.append(f"{name}: the folder has no .yaml or .yml file")
        yield from map(str, files)


def _content(name: str) -> bytes:
    if name == "-":
        return _beginning(sys.stdin.buffer)
    with Path(name).open("rb") as file:
        return _beginning(file)


def _beginning(file: BinaryIO) -> bytes:
    """The content, or more than is accepted of it."""
    return file.read(MAX_BYTES + 1)
