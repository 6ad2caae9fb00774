# Generated from aio/following.py: change that file, and run `make client`.
"""Streams of server-sent events that continue after a lost connection."""

from collections.abc import Iterator
from typing import Any, Final

from httpx_sse import EventSource, ServerSentEvent, SSEError
from pydantic_core import from_json

from mooring_client.answers import error_in_stream
from mooring_client.calls import Call
from mooring_client.errors import MooringError
from mooring_client.failures import BadAnswer, ConnectionFailed
from mooring_client.reconnecting import SILENT_S, Reconnecting
from mooring_client.sync.sleeping import sleep
from mooring_client.sync.transport import Transport

MEDIA_TYPE: Final = "text/event-stream"


def followed(
    transport: Transport, call: Call[Any], last_id: str | None, *, ends: bool
) -> Iterator[dict[str, Any]]:
    """Yield the data of each event. After a lost connection, continue after the last one.

    Args:
        last_id: the ID of the last event that the caller has.
        ends: whether the stream can end by itself, such as logs; if not, a clean end is a lost connection.

    Raises:
        MooringError: what the server answered, or the reason for which it ended the stream.
        ConnectionFailed: the server could not be reached for longer than the client's `reconnect_s`.
        BadAnswer: an event is not one of Mooring.
    """
    reconnecting = Reconnecting(transport.reconnect_s)
    while True:
        failure: MooringError | ConnectionFailed
        try:
            for event in _events(transport, call, last_id):
                data = _object(event)
                if isinstance(data.get("error"), dict) and not event.id:
                    raise error_in_stream(data["error"])
                reconnecting.connected()
                last_id = event.id or last_id
                yield data
            if ends:
                return
            failure = ConnectionFailed(f"{transport.endpoint.url} ended the stream")
        except (MooringError, ConnectionFailed) as error:
            failure = error
        sleep(reconnecting.pause_after(failure))


def _object(event: ServerSentEvent) -> dict[str, Any]:
    try:
        found = from_json(event.data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadAnswer(f"an event of the stream is no JSON object: {event.data[:200]!r}; check the URL")
    return found


def _events(transport: Transport, call: Call[Any], last_id: str | None) -> Iterator[ServerSentEvent]:
    headers = {"Accept": MEDIA_TYPE, **({} if last_id is None else {"Last-Event-ID": last_id})}
    with transport.stream(call, headers, SILENT_S) as response:
        try:
            for event in EventSource(response).iter_sse():
                yield event
        except SSEError as error:
            raise BadAnswer(f"the stream is not one of Mooring: {error}") from None
