"""`mooring cp` from an instance. What the container sends is not trusted."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tarfile import TarInfo
from typing import TYPE_CHECKING, Final

import typer

from mooring_client.cli.attached import write_all
from mooring_client.cli.copying.archives import (
    ArchiveSource,
    BrokenArchive,
    CopyFailed,
    path_below,
    split_path,
)
from mooring_client.cli.copying.report import Report
from mooring_client.cli.copying.scripts import READ, RunningScript, running_script
from mooring_client.cli.copying.unpacking import Unpacker

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

_SOME_FILES_CHANGED: Final = 1  # the exit code of GNU's tar after a complete archive


class Download:
    """Copies from an instance."""

    def __init__(self, client: "Mooring", instance_id: str, report: Report, *, follow_links: bool) -> None:
        self._client, self._instance_id, self._report = client, instance_id, report
        self._follow_links = follow_links

    def run(self, path: str, local: str) -> None:
        """Copy a file or folder.

        Args:
            local: where to; `-`: as an archive to stdout.

        Raises:
            CopyFailed: not all was copied.
            typer.BadParameter: stdout is a terminal.
        """
        if local == "-" and sys.stdout.isatty():
            raise typer.BadParameter("an archive cannot be shown in a terminal; redirect stdout")
        folder, name = split_path(path)
        arguments = [folder, name, "h" if self._follow_links else ""]
        with running_script(self._client, self._instance_id, READ, arguments, {"read"}) as script:
            if local == "-":
                self._to_stdout(script)
            else:
                self._unpack(script, name, local)
        for message in script.messages():
            self._report.tell(message)

    def _counted(self, script: RunningScript) -> Iterator[bytes]:
        for data in script.output():
            self._report.copied(len(data))
            yield data

    def _to_stdout(self, script: RunningScript) -> None:
        for data in self._counted(script):
            try:
                write_all(sys.stdout.fileno(), data)
            except BrokenPipeError:
                raise  # the reader has what it wants; cli/main.py ends the command
            except OSError as error:
                raise CopyFailed(f"cannot write to stdout: {error.strerror}") from None
        if script.ended():
            raise script.failure()

    def _unpack(self, script: RunningScript, name: str, local: str) -> None:
        source = ArchiveSource(self._counted(script))
        unpacker: Unpacker | None = None
        with ExitStack() as exits:
            try:
                for member in source.members():
                    path = path_below(member, name)
                    if unpacker is None:
                        unpacker = exits.enter_context(self._begun(member, name, local))
                    if member.islnk():
                        unpacker.link(path, path_below(TarInfo(member.linkname), name))
                    else:
                        unpacker.place(path, member, source.data(member.size))
            except BrokenArchive:
                if source.ended and script.ended():
                    raise script.failure() from None
                raise
            code = script.ended()
            if unpacker is None or code not in {0, _SOME_FILES_CHANGED}:
                raise script.failure()
            unpacker.finish()
        if code:
            raise script.failure()

    def _begun(self, first: TarInfo, name: str, local: str) -> Unpacker:
        if first.isreg():
            self._report.expect(first.size)
        folder, top = _target(local, name, is_folder=first.isdir())
        return Unpacker(folder, top, self._report.skipped)


def _target(local: str, name: str, *, is_folder: bool) -> tuple[str, str | None]:
    """The local folder to copy into, and what the copy is called; None: what is copied is its content.

    Raises:
        CopyFailed: something else is there.
    """
    try:
        mode = Path(local).stat().st_mode
    except OSError:  # there is nothing, or a link that leads nowhere
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        return local, None if name == "." else name
    if mode is not None and (is_folder or local.endswith("/")):
        raise CopyFailed(f"{local} is not a folder")
    if mode is not None and not stat.S_ISREG(mode):
        raise CopyFailed(f"{local} is a special file; - writes an archive to stdout")
    if local.endswith("/") and not is_folder:
        raise CopyFailed(f"there is no folder {local}")
    folder, top = os.path.split(local.rstrip("/"))
    return folder or ("/" if local.startswith("/") else "."), top
