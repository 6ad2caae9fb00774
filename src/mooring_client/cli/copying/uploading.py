"""`mooring cp` to an instance."""

import os
import posixpath
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final

import typer

from mooring_client.cli.copying.archives import CopyFailed, split_path
from mooring_client.cli.copying.packing import Packer
from mooring_client.cli.copying.report import Report
from mooring_client.cli.copying.scripts import WRITE, RunningScript, running_script
from mooring_client.cli.foreground import foreground
from mooring_client.stream_messages import MAX_DATA_BYTES

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

Write = Callable[[bytes], None]
# Another answer must not make the client send something else.
_ANSWERS: Final = {
    "archive": {"archive"}, "file": {"file"}, "folder": {"into", "new"}, "content": {"new", "merge"},
}  # fmt: skip


class Upload:
    """Copies to an instance."""

    def __init__(self, client: "Mooring", instance_id: str, report: Report, *, follow_links: bool) -> None:
        self._client, self._instance_id, self._report = client, instance_id, report
        self._follow_links = follow_links
        self._temporary = f".mooring-{token_hex(8)}"
        self._sender: _Sender | None = None
        self._interrupted = False

    def run(self, local: str, path: str) -> None:
        """Copy a file or folder. Ctrl-C ends it, after the instance has removed a part of a file.

        Args:
            local: what to copy; `-`: what the archive on stdin has.

        Raises:
            CopyFailed: not all was copied.
            typer.BadParameter: stdin is a terminal.
        """
        foreground(lambda: self._copy(local, path), {signal.SIGINT: self._interrupt})

    def _interrupt(self) -> None:
        if self._interrupted or self._sender is None:
            raise KeyboardInterrupt
        self._interrupted = True
        self._report.tell("stopping; Ctrl-C again does not wait for the instance")
        # In a thread of its own, because it waits while the instance takes no input.
        threading.Thread(target=self._sender.stop, name="stop", daemon=True).start()

    def _copy(self, local: str, path: str) -> None:
        kind, name = self._what(local)
        must_be_folder, stripped = "/" if path.endswith("/") else "", path.rstrip("/") or "/"
        folder, last = posixpath.split(stripped)
        arguments = [kind, stripped, folder or ".", last, must_be_folder, name, self._temporary]
        with running_script(self._client, self._instance_id, WRITE, arguments, _ANSWERS[kind]) as script:
            self._send(script, local, name)
        for message in script.messages():
            self._report.tell(message)

    def _what(self, local: str) -> tuple[str, str]:
        """What comes, in the words of the script, and its name."""
        if local == "-":
            if sys.stdin.isatty():
                raise typer.BadParameter("stdin is a terminal; redirect an archive to it")
            return "archive", ""
        _folder, name = split_path(local)
        path = _path(local)
        try:
            mode = path.stat(follow_symlinks=self._follow_links).st_mode
            if stat.S_ISDIR(mode):
                return "content" if name == "." else "folder", name
            if stat.S_ISREG(mode):
                with path.open("rb") as file:
                    self._report.expect(os.fstat(file.fileno()).st_size)
                return "file", name
        except OSError as error:
            raise CopyFailed(f"cannot read {local}: {error.strerror}") from None
        if stat.S_ISLNK(mode):
            raise CopyFailed(f"{local} is a link; -L copies what it leads to")
        raise CopyFailed(f"{local} is a special file")

    def _send(self, script: RunningScript, local: str, name: str) -> None:
        answer = script.answer
        sender = _Sender(script, self._report, lambda write: self._feed(answer, write, local, name))
        self._sender = sender
        try:
            sender.start()
            for _ended in script.output():
                sender.stop()
            code = script.ended()
        finally:
            sender.stop()
        if self._interrupted:
            raise KeyboardInterrupt
        if answer != "archive":  # otherwise it may wait for what follows the archive on stdin
            sender.join()
        if sender.failure is not None:
            raise sender.failure
        if code:
            raise script.failure()

    def _feed(self, answer: str, write: Write, local: str, name: str) -> None:
        if answer == "archive":
            while data := os.read(sys.stdin.fileno(), MAX_DATA_BYTES):
                write(data)
            return
        packer = Packer(write, self._report.skipped, follow_links=self._follow_links)
        if answer == "merge":
            packer.add_content(_path(local))
        else:
            packer.add(_path(local), {"file": self._temporary, "into": name, "new": "."}[answer])
        packer.end()


def _path(local: str) -> Path:
    """The path of SRC. A `/` or `/.` at its end follows a link, as everywhere."""
    return Path(local).resolve() if local.endswith(("/", "/.")) else Path(local)


class _Sender(threading.Thread):
    """Sends input to a script, while another thread waits for its end.

    Args:
        feed: is called with a function that sends data.

    Attributes:
        failure: why not all was sent, although the script did not end.
    """

    def __init__(self, script: RunningScript, report: Report, feed: Callable[[Write], None]) -> None:
        super().__init__(name="sender", daemon=True)
        self.failure: CopyFailed | None = None
        self._script, self._report, self._feed = script, report, feed
        self._stopped = False

    def run(self) -> None:
        try:
            self._feed(self._write)
        except CopyFailed as failure:
            self.failure = failure
        except OSError as error:
            self.failure = CopyFailed(f"cannot read stdin: {error.strerror}")
        except _Stopped:
            pass
        self._script.command.close_stdin()

    def stop(self) -> None:
        """The script needs no more input."""
        self._stopped = True
        self._script.command.close_stdin()

    def _write(self, data: bytes) -> None:
        if self._stopped:
            raise _Stopped
        self._script.command.write(data)
        self._report.copied(len(data))


class _Stopped(Exception):
    """The script needs no more input."""
