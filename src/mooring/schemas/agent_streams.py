"""Messages of log and exec streams between a node and a replica (`/agent/v1/stream…`)."""

from typing import Annotated, Literal, Self

from pydantic import Field

from mooring.core.text import LongText, Text
from mooring.schemas.peer import Peer


class LogsRequest(Peer):
    tail: int | None
    since: Text | None
    follow: bool


class ExecRequest(Peer):
    command: list[LongText]
    timeout_s: int
    max_output_bytes: int


class StreamRequest(Peer):
    """A stream that a user waits for. The node sends frames to `url`; null: to the URL of its sync calls."""

    id: Text
    instance_id: Text
    attempt: int
    url: Text | None
    logs: LogsRequest | None = None
    exec: ExecRequest | None = None


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


class StreamFrame(Peer):
    """One line of the body of `POST /agent/v1/streams/{id}` (newline-delimited JSON).

    An empty frame is a keepalive. A frame with `end`, `exit_code` or `error` is the last.
    """

    stream: Literal["stdout", "stderr"] | None = None
    at: str | None = None
    text: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    end: bool = False
    error: StreamError | None = None

    @classmethod
    def of_error(cls, code: str, message: str) -> Self:
        return cls(error=StreamError(code=code, message=message))

    @property
    def is_last(self) -> bool:
        return self.end or self.error is not None or self.exit_code is not None
