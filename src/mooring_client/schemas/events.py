"""Schemas of events."""

from typing import Annotated, Any

from pydantic import Field

from mooring_client.schemas.base import Answer, Timestamp


class Event(Answer):
    id: str
    seq: int
    type: str
    at: Timestamp
    data: dict[str, Any]


class EventList(Answer):
    items: Annotated[list[Event], Field(max_length=200)]
    next_cursor: str | None = None
    last_seq: int


class InstanceEvents(Answer):
    items: Annotated[list[Event], Field(max_length=200)]
    next_cursor: str | None = None
