"""The events of a node's GPUs, counted by kind: no number of them can fill the memory or hide others."""

from collections.abc import Iterable
from typing import Final

from mooring.agent.nvml.types import GpuEvent

Kind = tuple[str | None, str, tuple[str, ...]]

KINDS_KEPT: Final = 8192
# An event like one of a moment ago is no news: it waits for the next regular report.
NEWS_AFTER_S: Final = 10.0


def kind_of(event: GpuEvent) -> Kind:
    return event["uuid"], event["code"], tuple(event["mig_uuids"])


class EventLedger:
    """Counts since it was made. To be used by one thread."""

    def __init__(self) -> None:
        self._events: dict[Kind, GpuEvent] = {}
        self._seen_at: dict[Kind, float] = {}
        self._told: tuple[GpuEvent, ...] = ()

    def add(self, events: Iterable[GpuEvent], now: float) -> bool:
        """Count these; whether any of them is news."""
        is_new = False
        for event in events:
            kind = kind_of(event)
            is_new = is_new or now - self._seen_at.get(kind, -NEWS_AFTER_S) >= NEWS_AFTER_S
            self._seen_at[kind] = now
            before = self._events.get(kind)
            if before is None:
                self._events[kind] = event
            else:
                count = before["count"] + event["count"]
                self._events[kind] = {**event, "count": count, "first_at": before["first_at"]}
            self._told = ()
        while len(self._events) > KINDS_KEPT:
            oldest = next(iter(self._events))
            del self._events[oldest], self._seen_at[oldest]
        return is_new

    def events(self) -> tuple[GpuEvent, ...]:
        """One for each kind, the first seen first; the same object until one is added."""
        if not self._told and self._events:
            self._told = tuple(self._events.values())
        return self._told
