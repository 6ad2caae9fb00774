"""Counts the events of a node's GPUs by kind, so that no flood of events fills memory or hides others."""

from collections.abc import Iterable
from typing import Final

from mooring.agent.nvml.types import GpuEvent

Kind = tuple[str | None, str, tuple[str, ...]]  # UUID of the GPU, code, UUIDs of MIG devices

MAX_KINDS: Final = 8192
# An event is news if none of its kind came for this long; other events wait for the next regular report.
NEWS_AFTER_S: Final = 10.0


def kind_of(event: GpuEvent) -> Kind:
    return event["uuid"], event["code"], tuple(event["mig_uuids"])


class EventLedger:
    """Counts since its creation. Used by one thread."""

    def __init__(self) -> None:
        self._events: dict[Kind, GpuEvent] = {}
        self._seen_at: dict[Kind, float] = {}
        self._cached: tuple[GpuEvent, ...] = ()

    def add(self, events: Iterable[GpuEvent], now: float) -> bool:
        """Count these events. Returns whether any of them is news."""
        is_news = False
        for event in events:
            kind = kind_of(event)
            is_news = is_news or now - self._seen_at.get(kind, -NEWS_AFTER_S) >= NEWS_AFTER_S
            self._seen_at[kind] = now
            before = self._events.get(kind)
            if before is None:
                self._events[kind] = event
            else:
                count = before["count"] + event["count"]
                self._events[kind] = {**event, "count": count, "first_at": before["first_at"]}
            self._cached = ()
        while len(self._events) > MAX_KINDS:
            oldest = next(iter(self._events))
            del self._events[oldest], self._seen_at[oldest]
        return is_news

    def events(self) -> tuple[GpuEvent, ...]:
        """One event per kind, in order of first occurrence; the same tuple until an event is added."""
        if not self._cached and self._events:
            self._cached = tuple(self._events.values())
        return self._cached
