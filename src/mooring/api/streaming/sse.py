"""Server-sent events: frames and keepalives."""

from pydantic_core import to_json

from mooring_client.schemas.base import Json

MEDIA_TYPE = "text/event-stream"
KEEPALIVE_S = 15.0
KEEPALIVE = b": still here\n\n"
# Without these, proxies may buffer events.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: Json, event_id: str | int | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line is enough."""
    head = b"" if event_id is None else f"id: {event_id}\n".encode()
    return head + b"data: " + to_json(data) + b"\n\n"


def error(code: str, message: str) -> bytes:
    """The last event of a stream that ends early."""
    return frame({"error": {"code": code, "message": message}})


def wanted(accept: str | None) -> bool:
    """Whether the client accepts an event stream."""
    return accept is not None and MEDIA_TYPE in accept.lower()
