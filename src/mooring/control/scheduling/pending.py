"""Pending instances as scheduler requests, cached between cycles since a long queue changes little."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from mooring.control.instances import gangs, placement_rules
from mooring.control.scheduling import requests
from mooring.core.instance.spec import CHANGEABLE_FIELDS
from mooring.core.instance.state import State
from mooring.db.tables import Instance, Project
from mooring.db.types import JsonObject
from mooring.scheduler.model import Gang, Request

_CHUNK = 1000
_changeable = attrgetter(*CHANGEABLE_FIELDS)
_NO_SELECTOR: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class _Key:
    """The fields of a request that may change while the instance is pending."""

    queued_at: datetime
    changeable: tuple[Any, ...]  # as CHANGEABLE_FIELDS
    gang: Gang | None
    project_selector: Mapping[str, str]
    disk_limits: bool


class Pending:
    """The requests of pending instances, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[_Key, Request]] = {}

    def current(self, session: Session) -> tuple[Request, ...]:
        """The requests that may be placed: without those of groups that wait for a member (`gangs.of`)."""
        columns = (
            Instance.id, Instance.queued_at, Instance.group_id, Instance.project_id,
            Project.require_disk_limits, *(getattr(Instance, name) for name in CHANGEABLE_FIELDS),
        )  # fmt: skip
        query = (
            select(*columns)
            .join(Project, Project.id == Instance.project_id)
            .where(Instance.state == State.PENDING)
        )
        rows = session.execute(query.order_by(Instance.queued_at, Instance.id)).all()
        gang_of = gangs.of(session, {row.group_id for row in rows if row.group_id is not None})
        selector_of = placement_rules.selectors(session)
        keys = {
            row.id: _key(row, gang_of.get(row.group_id or ""), selector_of.get(row.project_id, _NO_SELECTOR))
            for row in rows
            if row.group_id is None or row.group_id in gang_of
        }
        known: dict[str, tuple[_Key | None, Request]] = dict(self._cached)
        unread = [row.id for row in rows if row.id not in known]
        known.update((key, (None, request)) for key, request in _read(session, unread).items())
        self._cached = {
            instance_id: _current(key, *known[instance_id])
            for instance_id, key in keys.items()
            if instance_id in known
        }
        return tuple(request for _key, request in self._cached.values())


def _key(row: Any, gang: Gang | None, selector: Mapping[str, str]) -> _Key:
    return _Key(row.queued_at, _changeable(row), gang, selector, row.require_disk_limits)


def _current(key: _Key, before: _Key | None, request: Request) -> tuple[_Key, Request]:
    return (before, request) if key == before else (key, _with(key, request))


def _with(key: _Key, request: Request) -> Request:
    return replace(
        request,
        queued_at=key.queued_at.timestamp(),
        gang=key.gang,
        project_selector=key.project_selector,
        disk_limits=key.disk_limits,
        **dict(zip(CHANGEABLE_FIELDS, key.changeable, strict=True)),
    )


def _read(session: Session, instance_ids: Sequence[str]) -> Mapping[str, Request]:
    found: dict[str, Request] = {}
    for start in range(0, len(instance_ids), _CHUNK):
        found.update(_requests(session, instance_ids[start : start + _CHUNK]))
    return found


def _requests(session: Session, instance_ids: Collection[str]) -> Mapping[str, Request]:
    found = _select(session, _COLUMNS.where(Instance.id.in_(instance_ids)))
    return {request.instance_id: request for request in found}


def recent_requests(session: Session, most: int) -> tuple[Request, ...]:
    """The requests of the newest instances, in any state."""
    return tuple(_select(session, _COLUMNS.order_by(Instance.id.desc()).limit(most)))


_COLUMNS = select(Instance.id, Instance.project_id, Instance.queued_at, Instance.spec)


def _select(session: Session, query: Select[str, str, datetime, JsonObject]) -> Iterator[Request]:
    for instance_id, project_id, queued_at, spec in session.execute(query):
        yield requests.of_columns(instance_id, project_id, queued_at.timestamp(), spec)
