"""Events on the wire."""

from typing import Any

from mooring.schemas.base import Answer, Timestamp


class Event(Answer):
    id: str
    seq: int
    type: str
    at: Timestamp
    data: dict[str, Any]


class EventList(Answer):
    items: list[Event]
    next_cursor: str | None = None
    last_seq: int


class InstanceEvents(Answer):
    items: list[Event]
    next_cursor: str | None = None
