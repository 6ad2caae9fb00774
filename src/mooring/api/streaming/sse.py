"""Server-sent events: framing, and signs of life while there is nothing to say."""

from pydantic_core import to_json

from mooring.schemas.base import Json

MEDIA_TYPE = "text/event-stream"
KEEPALIVE_S = 15.0
KEEPALIVE = b": still here\n\n"
# Proxies would otherwise hold events back until a buffer is full.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: Json, event_id: str | int | None = None) -> bytes:
    """One event. JSON holds no raw line break, so one `data:` line is enough."""
    head = b"" if event_id is None else f"id: {event_id}\n".encode()
    return head + b"data: " + to_json(data) + b"\n\n"


def error(code: str, message: str) -> bytes:
    """Why a stream ends before its time."""
    return frame({"error": {"code": code, "message": message}})


def wanted(accept: str | None) -> bool:
    """Whether the client asked for a stream of events."""
    return accept is not None and MEDIA_TYPE in accept.lower()
