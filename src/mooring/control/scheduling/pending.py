"""Pending instances as scheduler requests. Only those that have changed since the last read are read again.

Each change of an instance's state has an event. A PATCH of a pending instance has none; it changes
`Project.pending_changes` instead. Each refresh also reads a part of the other rows, which bounds the effect
of a fault of ours. To read all of a long queue at once would delay pages and cycles for a second.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, true, tuple_
from sqlalchemy.orm import Session

from mooring.control.instances import gangs
from mooring.control.scheduling import requests
from mooring.control.volumes import mounts
from mooring.db.tables import Event, Instance, Project
from mooring.db.types import JsonObject
from mooring.scheduler.model import Gang, Request, VolumeNeeds
from mooring_client.schemas.spec import CHANGEABLE_FIELDS
from mooring_client.schemas.states import State

_CHUNK = 1000
# Each row of a queue is read again about this often, or more often if there are less than _READ_AGAIN.
READ_ALL_S = 60.0
# Of many cycles in this time, only the first reads a part.
_BETWEEN_PARTS_S = 2.0
_READ_AGAIN = 1000
_PENDING = Instance.state == State.PENDING
_changeable = attrgetter(*CHANGEABLE_FIELDS)

_Position = tuple[datetime, str]  # in the table's index of pending instances: `queued_at` and id


@dataclass(frozen=True, slots=True)
class _ProjectRules:
    """What a project's row says about its pending instances."""

    changes: int = 0  # see `Project.pending_changes`
    disk_limits: bool = False
    host_network: bool = False  # of groups
    selector: tuple[tuple[str, str], ...] = ()


_NO_RULES = _ProjectRules()


@dataclass(frozen=True, slots=True)
class _Key:
    """The fields of a request that may change while the instance is pending."""

    queued_at: datetime
    changeable: tuple[Any, ...]  # as CHANGEABLE_FIELDS
    gang: Gang | None
    rules: _ProjectRules
    volume_needs: VolumeNeeds | None


@dataclass(frozen=True, slots=True)
class _Row:
    """A pending instance."""

    queued_at: datetime
    changeable: tuple[Any, ...]
    group_id: str | None
    project_id: str


class Pending:
    """The requests of all pending instances. Not thread-safe.

    Sessions may be older than what is cached: then they change nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at: float | None = None  # when the last part was read
        self._read_to: _Position | None = None  # the end of that part; None: of the queue
        self._floor = 0  # every event up to this `seq` is included
        self._seen: frozenset[int] = frozenset()  # later events that are included
        self._rules: Mapping[str, _ProjectRules] = {}
        self._volume_needs: Mapping[str, VolumeNeeds] = {}
        self._gangs: dict[str, Gang] = {}
        self._rows: dict[str, _Row] = {}
        self._keys: dict[str, _Key] = {}  # of `_requests`
        self._requests: dict[str, Request] = {}
        self._current: tuple[Request, ...] = ()

    def refresh(self, session: Session, complete_to: float) -> tuple[Request, ...]:
        """As `current`; also forgets which events it has seen, and reads a part of the rows again.

        Args:
            complete_to: what `event_order.complete_to` returned in a transaction that ended before `session`.
        """
        if self._read_at is None:
            newest = session.scalar(select(func.max(Event.seq))) or 0
            self._floor = max(self._floor, int(min(complete_to, newest)))
            self._seen = frozenset(_events(session, self._floor))
            return self._read_all(session)
        if self._catch_up(session):
            self._read_part(session, self._read_at)
        self._floor = int(min(complete_to, max(self._seen, default=self._floor)))
        self._seen = frozenset(seq for seq in self._seen if seq > self._floor)
        return self._current

    def current(self, session: Session) -> tuple[Request, ...]:
        """The requests that may be placed: without those of groups that wait for a member (`gangs.of`).

        Unchanged requests are the same objects; if nothing has changed, so is the tuple.
        """
        if self._read_at is None:
            return Pending(self._clock)._read_all(session)
        self._catch_up(session)
        return self._current

    def _catch_up(self, session: Session) -> bool:
        """Read what has changed. False: the session began before the one that was last used here."""
        events = _events(session, self._floor)
        if not self._seen <= events.keys():
            return False
        rules = _rules(session)
        changed_projects = {each for each, _rule in rules.items() ^ self._rules.items()}
        changed = {instance_id for seq, instance_id in events.items() if seq not in self._seen}
        if changed_projects:
            changed |= {each for each, row in self._rows.items() if row.project_id in changed_projects}
        volume_needs = mounts.needs_of_pending(session)
        # A placement binds the volumes that other pending instances mount too.
        bound = {instance_id for instance_id, _needs in volume_needs.items() ^ self._volume_needs.items()}
        changed |= bound & self._rows.keys()
        self._seen, self._rules, self._volume_needs = frozenset(events), rules, volume_needs
        if changed:
            self._read_changed(session, changed)
        return True

    def added(self, session: Session, instance_ids: Collection[str]) -> tuple[Request, ...]:
        """The requests of instances that this transaction has added; they are not cached."""
        alone = Pending(self._clock)
        alone._rules, alone._volume_needs = _rules(session), mounts.needs_of_pending(session)
        alone._read_changed(session, set(instance_ids))
        return alone._current

    def _read_all(self, session: Session) -> tuple[Request, ...]:
        self._read_at = self._clock()
        self._rules, self._volume_needs = _rules(session), mounts.needs_of_pending(session)
        self._rows = dict(_rows(session, _PENDING))
        groups = {row.group_id for row in self._rows.values() if row.group_id}
        self._gangs = gangs.of(session, groups)
        self._update(session, self._rows.keys())
        return self._current

    def _read_part(self, session: Session, read_at: float) -> None:
        """Read the next rows again, as many as are due since `read_at`."""
        passed_s = self._clock() - read_at
        if passed_s < _BETWEEN_PARTS_S:
            return
        due = int(min(passed_s / READ_ALL_S, 1.0) * max(len(self._rows), _READ_AGAIN))
        begin = self._read_to
        after = true() if begin is None else tuple_(Instance.queued_at, Instance.id) > begin
        found = dict(_rows(session, _PENDING & after, limit=due))
        self._read_at = self._clock()
        self._read_to = _position(*list(found.items())[-1]) if len(found) == due else None
        for missing in self._between(begin, self._read_to) - found.keys():
            self._rows.pop(missing)
            self._forget(missing)
        self._rows |= found
        groups = {row.group_id for row in found.values() if row.group_id}
        self._update(session, found.keys() | self._read_gangs(session, groups))

    def _between(self, begin: _Position | None, end: _Position | None) -> set[str]:
        """The cached instances after `begin` (None: from the first) up to `end` (None: to the last)."""
        positions = (_position(*each) for each in self._rows.items())
        return {at[1] for at in positions if (begin is None or at > begin) and (end is None or at <= end)}

    def _read_changed(self, session: Session, changed: set[str]) -> None:
        found: dict[str, tuple[State, str | None]] = {}
        for chunk in _chunks(changed):
            query = select(Instance.id, Instance.state, Instance.group_id).where(Instance.id.in_(chunk))
            found.update((row.id, (row.state, row.group_id)) for row in session.execute(query))
        pending = [each for each, (state, _group) in found.items() if state is State.PENDING]
        for gone in changed.difference(pending):
            self._rows.pop(gone, None)
            self._forget(gone)
        for chunk in _chunks(pending):
            self._rows.update(_rows(session, Instance.id.in_(chunk)))
        groups = {group for _state, group in found.values() if group}
        self._update(session, {*pending, *self._read_gangs(session, groups)})

    def _read_gangs(self, session: Session, groups: set[str]) -> set[str]:
        """Read these groups again, and return their pending members."""
        if not groups:
            return set()
        self._gangs = {each: gang for each, gang in self._gangs.items() if each not in groups}
        self._gangs |= gangs.of(session, groups)
        return {each for each, row in self._rows.items() if row.group_id in groups}

    def _update(self, session: Session, changed: Collection[str]) -> None:
        """Update the requests of these instances, which are pending."""
        unread = [each for each in changed if each not in self._requests]
        read = {each.instance_id: each for each in _specs(session, unread)}
        for instance_id in changed:
            row = self._rows[instance_id]
            gang = self._gangs.get(row.group_id) if row.group_id else None
            request = self._requests.get(instance_id) or read.get(instance_id)
            if request is None or (row.group_id and gang is None):
                self._forget(instance_id)
                continue
            rules, needs = self._rules.get(row.project_id, _NO_RULES), self._volume_needs.get(instance_id)
            key = _Key(row.queued_at, row.changeable, gang, rules, needs)
            if instance_id in read or key != self._keys.get(instance_id):
                self._keys[instance_id], self._requests[instance_id] = key, _with(key, request)
        current = tuple(self._requests.values())
        if current != self._current:
            self._current = current

    def _forget(self, instance_id: str) -> None:
        self._keys.pop(instance_id, None)
        self._requests.pop(instance_id, None)


def _events(session: Session, after: int) -> dict[int, str]:
    """The instances of the readable events after a `seq`."""
    query = select(Event.seq, Event.instance_id).where(Event.seq > after, Event.instance_id.is_not(None))
    return {row.seq: row.instance_id for row in session.execute(query)}


def _rules(session: Session) -> dict[str, _ProjectRules]:
    """By project; without those that have none."""
    columns = (
        Project.id, Project.pending_changes, Project.require_disk_limits, Project.host_network,
        Project.node_selector,
    )  # fmt: skip
    has_any = (
        (Project.pending_changes > 0) | Project.require_disk_limits | Project.host_network
        | Project.node_selector.is_not(None)
    )  # fmt: skip
    return {
        row.id: _ProjectRules(
            row.pending_changes, row.require_disk_limits, row.host_network,
            tuple(sorted((row.node_selector or {}).items())),
        )
        for row in session.execute(select(*columns).where(has_any, Project.deleted_at.is_(None)))
    }  # fmt: skip


def _position(instance_id: str, row: _Row) -> _Position:
    return row.queued_at, instance_id


def _rows(
    session: Session, condition: ColumnElement[bool], limit: int | None = None
) -> Iterator[tuple[str, _Row]]:
    """With a limit: the first ones by their position."""
    columns = (
        Instance.id, Instance.queued_at, Instance.group_id, Instance.project_id,
        *(getattr(Instance, name) for name in CHANGEABLE_FIELDS),
    )  # fmt: skip
    query = select(*columns).where(condition)
    if limit is not None:
        query = query.order_by(Instance.queued_at, Instance.id).limit(limit)
    for row in session.execute(query):
        yield row.id, _Row(row.queued_at, _changeable(row), row.group_id, row.project_id)


def _with(key: _Key, request: Request) -> Request:
    return replace(
        request,
        queued_at=key.queued_at.timestamp(),
        gang=key.gang,
        project_selector=dict(key.rules.selector),
        disk_limits=key.rules.disk_limits,
        volume_needs=key.volume_needs,
        **dict(zip(CHANGEABLE_FIELDS, key.changeable, strict=True)),
    )


def _specs(session: Session, instance_ids: Iterable[str]) -> Iterator[Request]:
    for chunk in _chunks(instance_ids):
        yield from _select(session, _COLUMNS.where(Instance.id.in_(chunk)))


def _chunks(ids: Iterable[str]) -> Iterator[Sequence[str]]:
    listed = sorted(ids)
    return (listed[start : start + _CHUNK] for start in range(0, len(listed), _CHUNK))


def recent_requests(session: Session, most: int) -> tuple[Request, ...]:
    """The requests of the newest instances, in any state."""
    return tuple(_select(session, _COLUMNS.order_by(Instance.id.desc()).limit(most)))


_COLUMNS = select(Instance.id, Instance.project_id, Instance.queued_at, Instance.spec)


def _select(session: Session, query: Select[str, str, datetime, JsonObject]) -> Iterator[Request]:
    for instance_id, project_id, queued_at, spec in session.execute(query):
        yield requests.of_columns(instance_id, project_id, queued_at.timestamp(), spec)
