"""The event log during a trial."""

from typing import Any

from tests.service import Client


def newest_seq(admin: Client) -> int:
    """The `seq` of the newest event."""
    seq = 0
    while items := admin.items("/v1/events", after=seq, limit=200):
        seq = items[-1]["seq"]
    return int(seq)


def events_after(admin: Client, seq: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while items := admin.items("/v1/events", after=seq, limit=200):
        found += items
        seq = items[-1]["seq"]
    return found
