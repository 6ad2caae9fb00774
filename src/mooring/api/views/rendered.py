"""Instances as JSON text, kept by version: pages are asked for again and again, and little of them changes.

All that an instance shows changes its `version` in the same transaction (that is what makes it an ETag), but
for its place in the queue, which is put in at the end.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from mooring.api.http import pagination
from mooring.api.views import instances as instance_views
from mooring.control.instances.instances import QUEUED
from mooring.core.instance.state import State
from mooring.db.tables import Instance

# Instances may be of a quarter of a megabyte each: a page of such ends early.
_MOST_PAGE_BYTES = 8 * 1024 * 1024
_KEPT_BYTES = 32 * 1024 * 1024  # of texts; some 20,000 usual instances, or 32 with the largest env

Key = tuple[str, int]
Heads = Sequence[Row[Any]]


def heads() -> Select[Any]:
    """What is read of every instance of a page; the rest only of those whose text is not at hand."""
    looked_at = Instance.reason["code"].as_string().is_distinct_from(QUEUED.code)
    return select(
        Instance.id, Instance.version, Instance.state, Instance.queued_at, looked_at.label("looked_at")
    )


def how_many_fit(texts: Sequence[bytes]) -> int:
    """How many fit into one answer, one at least."""
    total = 0
    for number, text in enumerate(texts):
        total += len(text)
        if total > _MOST_PAGE_BYTES and number:
            return number
    return len(texts)


class RenderedInstances:
    """Texts of the instances shown last, without their closing place in the queue."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._texts: OrderedDict[Key, bytes] = OrderedDict()
        self._bytes = 0

    def page(
        self,
        session: Session,
        query: Select[Any],
        asked: pagination.PageQuery,
        secret: bytes,
        positions: Mapping[str, int],
    ) -> bytes:
        """The whole answer for a page of a query made of `heads`."""
        rows, cursor = pagination.page(session, query, Instance.id, asked, secret)
        texts = self._texts_of(session, rows)
        fitting = how_many_fit([texts[row.id] for row in rows])
        if fitting < len(rows):
            rows = rows[:fitting]
            cursor = pagination.cursor_after(rows[-1], Instance.id, asked, secret)
        waiting = {row.id for row in rows if row.state is State.PENDING and row.looked_at}
        places = (positions.get(row.id) if row.id in waiting else None for row in rows)
        items = (
            b"%b,%b}" % (texts[row.id], b'"queue_position":' + to_json(place))
            for row, place in zip(rows, places, strict=True)
        )
        return b'{"items":[%b],"next_cursor":%b}' % (b",".join(items), to_json(cursor))

    def _texts_of(self, session: Session, rows: Heads) -> dict[str, bytes]:
        known = {row.id: text for row in rows if (text := self._texts.get((row.id, row.version)))}
        missing = [row.id for row in rows if row.id not in known]
        return known | self._rendered(session, missing) if missing else known

    def _rendered(self, session: Session, instance_ids: list[str]) -> dict[str, bytes]:
        rows = session.scalars(select(Instance).where(Instance.id.in_(instance_ids))).all()
        made = {
            row.id: to_json(shown)[:-1]
            for row, shown in zip(rows, instance_views.lasting(session, rows), strict=True)
        }
        with self._lock:
            for row in rows:
                self._keep((row.id, row.version), made[row.id])
        return made

    def _keep(self, key: Key, text: bytes) -> None:
        self._bytes += len(text) - len(self._texts.pop(key, b""))
        self._texts[key] = text
        while self._bytes > _KEPT_BYTES:
            _oldest, dropped = self._texts.popitem(last=False)
            self._bytes -= len(dropped)
