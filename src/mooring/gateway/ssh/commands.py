"""A shell, a command or a subsystem of an SSH client, as a command in the instance."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import asyncssh

from mooring.gateway.ssh.copying import ChannelOwner, Copying
from mooring.schemas.agent_streams import (
    MAX_ARGUMENT_BYTES,
    MAX_WINDOW,
    SIGNALS,
    ExecRequest,
    Signal,
    StreamStatus,
    WindowSize,
)
from mooring.streams.node_streams import NodeStream
from mooring_client.errors import BadRequest
from mooring_client.stream_messages import Channel

# The toolbox's, which is the same in all images; otherwise the image's, as in Debian, Alpine and Red Hat.
_SFTP_SERVER: Final = """
for each in /.mooring/bin /usr/lib/openssh /usr/lib/ssh /usr/libexec/openssh; do
    [ -x "$each/sftp-server" ] && exec "$each/sftp-server"
done
echo "mooring: sftp and scp need an sftp-server, and this image has none. The operator can build a toolbox" \\
    "(mooring toolbox, on the node), and instances that start later have it. Until then install one in the" \\
    "image, or copy with: ssh INSTANCE tar -c FOLDER | tar -x" >&2
exit 127
"""
_ALLOWED_ENV: Final = re.compile(r"LANG|LC_[A-Z_]+|TZ|COLORTERM|TERM_PROGRAM(_VERSION)?|GIT_PROTOCOL")
_MAX_ENV_BYTES: Final = 4096
_MAX_TERM_LENGTH: Final = 64
# A session without a command is closed after this time: no limit of a project counts it.
_STARTED_WITHIN_S: Final = 10.0
_SFTP: Final = "sftp"
# OpenSSH exits with 255 when the connection fails, so scripts can tell it from most exit codes of a command.
_FAILED: Final = 255

OpenCommand = Callable[[ExecRequest], Awaitable[NodeStream]]
Banner = Callable[[], Awaitable[str]]


class _AllowedEnvironment(dict[bytes, bytes]):
    """The variables of a session that the command may get, of limited size together. Others are ignored."""

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if not _ALLOWED_ENV.fullmatch(name.decode(errors="replace")):
            return
        others = sum(len(each) + len(self[each]) for each in self if each != name)
        if others + len(name) + len(value) <= _MAX_ENV_BYTES:
            super().__setitem__(name, value)


class CommandSession(Copying, asyncssh.SSHServerSession[bytes]):
    """One session of a client.

    Args:
        open_command: opens the stream.
        banner: shown at the start of a shell in a terminal.
    """

    def __init__(self, owner: ChannelOwner, open_command: OpenCommand, banner: Banner) -> None:
        super().__init__(owner)
        self._open_command, self._banner = open_command, banner
        self._command: list[str] = []
        self._is_shell = self._is_subsystem = False
        self._terminal: WindowSize | None = None
        self._term = ""
        self._unstarted: asyncio.TimerHandle | None = None

    def connection_made(self, chan: Any) -> None:
        super().connection_made(chan)
        # asyncssh stores all that a client sends, before it asks anyone.
        chan._env = _AllowedEnvironment()
        self._unstarted = asyncio.get_running_loop().call_later(_STARTED_WITHIN_S, self.abort)

    def session_started(self) -> None:
        self._end_wait()
        super().session_started()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._unstarted is not None:
            self._unstarted.cancel()

    def pty_requested(self, term_type: str, term_size: tuple[int, int, int, int], term_modes: object) -> bool:
        if len(term_type) > _MAX_TERM_LENGTH:
            return False
        self._terminal, self._term = _window(term_size[0], term_size[1]), term_type
        return True

    def shell_requested(self) -> bool:
        self._is_shell = True
        return self._requested("sh", "-l")

    def exec_requested(self, command: str) -> bool:
        return self._requested("sh", "-c", command)

    def subsystem_requested(self, subsystem: str) -> bool:
        self._is_subsystem = True
        if subsystem != _SFTP:
            self._forget()
            return False
        return self._requested("/bin/sh", "-c", _SFTP_SERVER)

    def _requested(self, *command: str) -> bool:
        """Returns False: the gateway has closed the session, which the client did not know yet."""
        if self._channel.is_closing():
            self._forget()
            return False
        self._command = list(command)
        return True

    def _forget(self) -> None:
        """The client decides how long a closed channel stays, and asyncssh has stored what it has sent."""
        chan = self.chan
        assert isinstance(chan, asyncssh.SSHServerChannel)
        chan._command = chan._subsystem = None
        self._command = []

    def _ended(self, task: asyncio.Task[None]) -> None:
        super()._ended(task)
        self._forget()

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        self.put_latest(Channel.RESIZE, _window(width, height).model_dump_json().encode())

    def signal_received(self, signal: str) -> None:
        if signal in SIGNALS:
            self.put_once(Channel.SIGNAL, Signal(signal=signal).model_dump_json().encode())

    async def open(self) -> NodeStream:
        """Raises MooringError: why the command cannot be started."""
        if any("\0" in part for part in self._command):
            raise BadRequest("a command cannot contain a NUL character")
        if any(len(part.encode(errors="surrogateescape")) > MAX_ARGUMENT_BYTES for part in self._command):
            raise BadRequest(f"a command may have {MAX_ARGUMENT_BYTES} bytes; copy a longer one as a file")
        if self._is_shell and self._terminal is not None:
            self._channel.write((await self._banner()).replace("\n", "\r\n").encode())
        return await self._open_command(
            ExecRequest(
                command=self._command,
                env=self._environment(),
                tty=self._terminal is not None,
                stdin=True,
                login_shell=not self._is_subsystem,
                any_shell=self._is_subsystem,
                window=self._terminal,
            )
        )

    def _environment(self) -> dict[str, str]:
        chan = self.chan
        assert isinstance(chan, asyncssh.SSHServerChannel)
        allowed = {
            name: value for name, value in _decoded(chan.get_environment()).items() if "\0" not in value
        }
        return allowed | ({"TERM": self._term} if self._term and "\0" not in self._term else {})

    def write(self, channel: Channel, data: bytes) -> None:
        chan = self.chan
        assert isinstance(chan, asyncssh.SSHServerChannel)
        if channel is Channel.STDERR:
            chan.write_stderr(data)
        else:
            chan.write(data)

    def end(self, status: StreamStatus) -> None:
        chan = self.chan
        assert isinstance(chan, asyncssh.SSHServerChannel)
        if status.reason is None:
            chan.exit(status.exit_code or 0)
        else:
            self.end_because(status.reason.message)

    def end_because(self, reason: str) -> None:
        """Tell the user why the session ends."""
        chan = self.chan
        if not isinstance(chan, asyncssh.SSHServerChannel) or chan.is_closing():
            return  # it has not begun, or has ended
        end = "\r\n" if self._terminal else "\n"
        chan.write_stderr(f"mooring: {reason}{end}".encode())
        chan.exit(_FAILED)


def _window(width: int, height: int) -> WindowSize:
    return WindowSize(width=min(width or 80, MAX_WINDOW), height=min(height or 24, MAX_WINDOW))


def _decoded(environment: Mapping[str, str] | Mapping[bytes, bytes]) -> dict[str, str]:
    return {
        name.decode(errors="replace") if isinstance(name, bytes) else name: (
            value.decode(errors="replace") if isinstance(value, bytes) else value
        )
        for name, value in environment.items()
    }
