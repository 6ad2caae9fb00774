"""Messages of streams between a node and the process that requested the stream."""

from typing import Annotated, Final, Self

from pydantic import ConfigDict, Field, StringConstraints

from mooring.schemas.peer import Peer
from mooring_client.schemas.text import NO_NUL, EnvName, EnvValue, Text

MAX_WINDOW: Final = 65_535
# Linux starts no program with an argument of more bytes (MAX_ARG_STRLEN, without its NUL).
MAX_ARGUMENT_BYTES: Final = 131_071

_BY_ALIAS: Final = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)


class LogsRequest(Peer):
    """Log lines: on the channels STDOUT and STDERR, each message is a time, a space and one line."""

    tail: int | None
    since: Text | None
    follow: bool


class WindowSize(Peer):
    """The data of the channel RESIZE, in characters."""

    model_config = _BY_ALIAS

    width: Annotated[int, Field(ge=1, le=MAX_WINDOW, alias="Width")]
    height: Annotated[int, Field(ge=1, le=MAX_WINDOW, alias="Height")]


# The signals that a command can get: those that SSH names (RFC 4254, section 6.10), and those of terminals.
SIGNALS: Final = frozenset(
    {
        "ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2",
        "TSTP", "CONT", "STOP", "WINCH",
    }
)  # fmt: skip


class Signal(Peer):
    """The data of the channel SIGNAL: a name without SIG."""

    model_config = _BY_ALIAS

    signal: Annotated[str, Field(pattern=r"^[A-Z0-9]{1,16}$", alias="Signal")]


class ExecRequest(Peer):
    """A command to run.

    Attributes:
        login_shell: replace the program of `command` by the login shell of the user, as sshd does.
        any_shell: replace the program of `command`, /bin/sh, by the toolbox's shell if the container has it.
        env: variables in addition to those of the container.
        timeout_s: the command is then killed; 0: never.
        max_output_bytes: further output is dropped; 0: no limit.
    """

    # Agents of earlier releases need all fields that they know.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    command: list[Annotated[str, StringConstraints(pattern=NO_NUL, max_length=MAX_ARGUMENT_BYTES)]]
    env: dict[EnvName, EnvValue] = {}
    user: Text | None = None
    working_dir: Text | None = None
    tty: bool = False
    stdin: bool = False
    login_shell: bool = False
    any_shell: bool = False
    window: WindowSize | None = None
    timeout_s: int = 0
    max_output_bytes: int = 0


class DialRequest(Peer):
    """A connection to a TCP port in the container's network namespace."""

    port: Annotated[int, Field(ge=1, le=65_535)]


class AttachRequest(Peer):
    """The main process of a container: its output from now on, its input, and its terminal.

    The first one after a start with `attach`, `tty` or `stdin` in the spec gets the output from the start,
    also if the process has ended meanwhile.

    Attributes:
        signal: only send this signal, named without SIG; the stream then ends.
    """

    stdin: bool = False
    window: WindowSize | None = None
    signal: Annotated[str, Field(pattern=r"^[A-Z0-9]{1,16}$")] | None = None


class StreamRequest(Peer):
    """A stream that a user waits for. The node opens a WebSocket for it at `url`.

    Attributes:
        url: of the process that waits; None: that of the node's other calls.
    """

    id: Text
    instance_id: Text
    attempt: int
    url: Text | None
    logs: LogsRequest | None = None
    exec: ExecRequest | None = None
    dial: DialRequest | None = None
    attach: AttachRequest | None = None


class StreamRequestsQuery(Peer):
    """The body of `POST /agent/v1/stream-requests`."""

    session: Annotated[int, Field(ge=0, lt=2**30)]
    wait_s: Annotated[float, Field(ge=0, le=60, description="seconds to wait for a new stream")] = 0
    known: Annotated[
        list[Annotated[Text, Field(max_length=64)]],
        Field(max_length=10_000, description="stream ids of the last answer, which do not count as new"),
    ] = []


class StreamRequests(Peer):
    """All requested streams for which the node has not connected yet."""

    control_plane_id: Text
    node_id: Text
    streams: list[StreamRequest]


class StreamError(Peer):
    code: str
    message: str


class StreamStatus(Peer):
    """The data of the channel STATUS: how the stream ended.

    Attributes:
        exit_code: of a command that ended by itself.
        reason: why the stream ended otherwise; None: with the command, the connection or the log.
        truncated: whether output beyond `max_output_bytes` was dropped.
    """

    exit_code: int | None = None
    reason: StreamError | None = None
    truncated: bool = False

    @classmethod
    def of_error(cls, code: str, message: str) -> Self:
        return cls(reason=StreamError(code=code, message=message))
