"""A cache of instances as JSON text, by version: lists are read often and change little.

Every field except the queue position changes only with `version`, which is the ETag. The queue position is
appended to the cached text.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from cachetools import LRUCache
from pydantic_core import to_json
from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from mooring.api.http import pagination
from mooring.api.views import instances as instance_views
from mooring.control.instances.instances import QUEUED
from mooring.core.port_urls import PortUrls
from mooring.db.tables import Instance
from mooring_client.schemas.states import State

# An instance may have 256 KiB, so a page of large ones ends early.
_MAX_PAGE_BYTES = 8 * 1024 * 1024
_CACHE_BYTES = 32 * 1024 * 1024  # of texts: about 20,000 usual instances

Key = tuple[str, int]
PageRows = Sequence[Row[Any]]


def page_columns() -> Select[Any]:
    """Select the columns that a page needs of every instance. Other columns are read if no text is cached."""
    considered = Instance.reason["code"].as_string().is_distinct_from(QUEUED.code)
    return select(
        Instance.id, Instance.version, Instance.state, Instance.queued_at, considered.label("considered")
    )


def count_fitting(texts: Sequence[bytes]) -> int:
    """Return how many texts fit into one answer, at least one."""
    total = 0
    for number, text in enumerate(texts):
        total += len(text)
        if total > _MAX_PAGE_BYTES and number:
            return number
    return len(texts)


class RenderedInstances:
    """Caches the texts of the instances read last, without their queue position.

    Args:
        urls: of ports through the proxy; None: there is no proxy.
    """

    def __init__(self, urls: PortUrls | None = None) -> None:
        self._lock = Lock()
        self._urls = urls
        self._texts: LRUCache[Key, bytes] = LRUCache(_CACHE_BYTES, getsizeof=len)

    def page(
        self,
        session: Session,
        query: Select[Any],
        params: pagination.PageQuery,
        secret: bytes,
        positions: Mapping[str, int],
    ) -> bytes:
        """Return the body of a page. `query` selects `page_columns`."""
        rows, cursor = pagination.page(session, query, Instance.id, params, secret)
        texts = self._texts_of(session, rows)
        fitting = count_fitting([texts[row.id] for row in rows])
        if fitting < len(rows):
            rows = rows[:fitting]
            cursor = pagination.cursor_after(rows[-1], Instance.id, params, secret)
        queued = {row.id for row in rows if row.state is State.PENDING and row.considered}
        queue_positions = (positions.get(row.id) if row.id in queued else None for row in rows)
        items = (
            b"%b,%b}" % (texts[row.id], b'"queue_position":' + to_json(position))
            for row, position in zip(rows, queue_positions, strict=True)
        )
        return b'{"items":[%b],"next_cursor":%b}' % (b",".join(items), to_json(cursor))

    def _texts_of(self, session: Session, rows: PageRows) -> dict[str, bytes]:
        with self._lock:
            known = {row.id: text for row in rows if (text := self._texts.get((row.id, row.version)))}
        missing = [row.id for row in rows if row.id not in known]
        return known | self._rendered(session, missing) if missing else known

    def _rendered(self, session: Session, instance_ids: list[str]) -> dict[str, bytes]:
        rows = session.scalars(select(Instance).where(Instance.id.in_(instance_ids))).all()
        texts = {
            row.id: to_json(shown)[:-1]
            for row, shown in zip(rows, instance_views.stable_fields(session, rows, self._urls), strict=True)
        }
        with self._lock:
            for row in rows:
                self._texts[row.id, row.version] = texts[row.id]
        return texts
