"""Retention: which rows are purged, and when.

Each sweep finds a batch of rows by their wall-clock times, then deletes those that are still due in a short
transaction (loops/retention.py). Never purged: the audit log, the GPU ledger (`allocations`,
`instance_records`), and rows that other rows refer to.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, String, cast, delete, exists, func, insert, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from mooring.control import events, idempotency
from mooring.control.instances import docker_containers, streams
from mooring.control.tenants import storage
from mooring.control.tenants.storage import StorageLimits
from mooring.db.tables import (
    Allocation,
    ApiKey,
    DockerContainer,
    Instance,
    InstanceGroup,
    InstanceRecord,
    JoinToken,
    Member,
    PortLink,
    Project,
    ProjectUsage,
    Registry,
    Reservation,
    Secret,
    SshKey,
    Template,
    User,
    Volume,
    Webhook,
    WebhookDelivery,
)
from mooring.db.types import now

Key = TypeVar("Key")

log = logging.getLogger(__name__)

# How much history, from the oldest row on, may be purged in an interval. It is 36 times what becomes due in
# that time, so no table grows. If a wrong clock makes all history due, it lasts for hours, not for seconds.
MAX_HISTORY: Final = timedelta(hours=6)
INTERVAL_S: Final = 600.0

# Minimum age of deleted instances, even if their project's storage is full: users may still wait for them.
_MIN_DELETED_AGE = timedelta(minutes=10)


# How long finished deliveries of webhooks can be listed and replayed.
_DELIVERIES_KEPT: Final = timedelta(days=7)

# A gateway whose clock is behind still finds a link that is about to expire.
_CLOCKS_DIFFER = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RetentionTimes:
    """How long rows are kept."""

    deleted: timedelta
    idempotency: timedelta
    events: timedelta


class Horizons:
    """Up to which time each kind of history may be purged in the present interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._horizons: dict[str, tuple[float, datetime]] = {}

    def before(self, kind: str, oldest: datetime, due_before: datetime) -> datetime:
        """Return the time before which rows may be purged, at most `due_before`.

        Args:
            oldest: the time of the oldest row that is due.
        """
        began_at, horizon = self._horizons.get(kind, (-math.inf, oldest))
        if self._clock() - began_at >= INTERVAL_S:
            horizon = oldest + MAX_HISTORY
            self._horizons[kind] = self._clock(), horizon
            if horizon < due_before:
                log.warning(
                    "%s are due that end up to %s apart; %s are purged each %.0f min, oldest first. If this "
                    "is unexpected, check the clock and the retention settings",
                    kind, due_before - oldest, MAX_HISTORY, INTERVAL_S / 60,
                )  # fmt: skip
        return min(horizon, due_before)


class Sweep(ABC):
    """Purges one kind of rows. Created for each run."""

    @abstractmethod
    def find(self, session: Session, most: int) -> Sequence[Any]:
        """Keys of up to `most` rows that are due; empty at the end."""

    @abstractmethod
    def remove(self, session: Session, keys: Sequence[Any]) -> int:
        """Delete those of the rows that are still due. Returns how many."""


def sweeps(kept: RetentionTimes, limits: StorageLimits, horizons: Horizons) -> list[Sweep]:
    """All sweeps, ordered so that rows are deleted before those they refer to."""
    before = now() - kept.deleted
    return [
        _Answers(kept.idempotency),
        _LostStreams(),
        _Instances(before, horizons),
        _InstancesOfFullProjects(limits),
        _Groups(before),
        _Rows(Reservation.id, or_(Reservation.deleted_at < before, Reservation.to_at < before)),
        _Rows(JoinToken.id, or_(JoinToken.used_at < before, JoinToken.expires_at < before)),
        _Rows(SshKey.id, SshKey.expires_at < before),
        # Gateways do this more often, while they accept Docker clients.
        _Rows(DockerContainer.id, docker_containers.unused()),
        _Rows(WebhookDelivery.id, WebhookDelivery.finished_at < now() - _DELIVERIES_KEPT),
        _Rows(PortLink.id, PortLink.expires_at < now() - _CLOCKS_DIFFER),
        _Rows(ApiKey.id, _dead_key(before)),
        _Rows(User.id, _unused_user(before)),
        _Projects(before),
        _Events(now() - kept.events, horizons),
    ]


class _Answers(Sweep):
    def __init__(self, kept: timedelta) -> None:
        self._kept = kept

    def find(self, session: Session, most: int) -> Sequence[Any]:
        return idempotency.expired(session, self._kept, most)

    def remove(self, session: Session, keys: Sequence[Any]) -> int:
        return idempotency.forget(session, keys, self._kept)


class _Rows(Sweep):
    """Rows that are simply deleted."""

    def __init__(self, key: InstrumentedAttribute[str], due: ColumnElement[bool]) -> None:
        self._key, self._due = key, due

    def find(self, session: Session, most: int) -> Sequence[str]:
        return session.scalars(select(self._key).where(self._due).limit(most)).all()

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        statement = delete(self._key.class_).where(self._key.in_(keys), self._due).returning(self._key)
        return len(session.scalars(statement).all())


class _LostStreams(Sweep):
    """Streams whose process has ended without ending them: the audit log records them too."""

    def find(self, session: Session, most: int) -> Sequence[str]:
        return streams.lost(session, most)

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        for stream_id in keys:
            streams.end(session, stream_id, None)
        return len(keys)


def _dead_key(before: datetime) -> ColumnElement[bool]:
    """Ended keys, except keys of the service: the next start would install the settings' admin key again."""
    ended = or_(ApiKey.revoked_at < before, ApiKey.expires_at < before)
    return ended & or_(ApiKey.project_id.is_not(None), ApiKey.user_id.is_not(None))


def _unused_user(before: datetime) -> ColumnElement[bool]:
    """Deleted users without references. Not those of a sign-on issuer: their rows reject their tokens."""
    referred = or_(exists().where(Member.user_id == User.id), exists().where(ApiKey.user_id == User.id))
    return (User.deleted_at < before) & User.issuer.is_(None) & ~referred


class _History(Sweep):
    """Rows of which a limited time may be purged at once (`Horizons`)."""

    kind: str

    def __init__(self, before: datetime, horizons: Horizons) -> None:
        self._before = before
        self._horizons: Horizons | None = horizons

    def _within_horizon(self, rows: Sequence[tuple[Key, datetime]]) -> list[Key]:
        """The keys of those rows that may be purged now. The first row found in a run is the oldest."""
        if rows and self._horizons is not None:
            self._before = self._horizons.before(self.kind, rows[0][1], self._before)
            self._horizons = None
        return [key for key, at in rows if at < self._before]


class _Instances(_History):
    """Deleted instances with their events. Those that were placed leave an instance record."""

    kind = "deleted instances"

    @property
    def _due(self) -> ColumnElement[bool]:
        return Instance.deleted_at < self._before

    def find(self, session: Session, most: int) -> Sequence[str]:
        query = select(Instance.id, Instance.deleted_at).where(self._due, ~_holds_gpus())
        rows = session.execute(query.order_by(Instance.deleted_at).limit(most))
        return self._within_horizon([(row.id, row.deleted_at) for row in rows])

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        purged = _purge(session, keys, self._due)
        events.forget_of_instances(session, purged)
        return len(purged)


class _InstancesOfFullProjects(Sweep):
    """Deleted instances of projects above half of their storage, oldest first.

    Their events are kept as long as all events: a full project must not delete what other readers need.
    """

    def __init__(self, limits: StorageLimits) -> None:
        self._limits = limits
        self._due = Instance.deleted_at < now() - _MIN_DELETED_AGE

    def find(self, session: Session, most: int) -> Sequence[str]:
        found: list[str] = []
        for project_id, excess in storage.above_half(session, self._limits):
            query = select(Instance.id, _stored_bytes()).where(Instance.project_id == project_id, self._due)
            query = query.where(~_holds_gpus()).order_by(Instance.deleted_at).limit(most - len(found))
            left = excess
            for instance_id, stored in session.execute(query):
                if left <= 0:
                    break
                found.append(instance_id)
                left -= stored
            if len(found) >= most:
                break
        return found

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        return len(_purge(session, keys, self._due))


def _holds_gpus() -> ColumnElement[bool]:
    """True only after a bug: a deleted instance has no GPUs. Purging it would hide the bug."""
    return exists().where(Allocation.instance_id == Instance.id, Allocation.to_at.is_(None))


def _stored_bytes() -> ColumnElement[int]:
    """`storage.size` of spec and labels, computed in SQL."""
    stored = func.length(cast(Instance.spec, String)) + func.length(cast(Instance.labels, String))
    return stored.label("stored_bytes")


def _purge(session: Session, keys: Sequence[str], due: ColumnElement[bool]) -> list[str]:
    names = [column.name for column in InstanceRecord.__table__.columns]
    columns = [getattr(Instance, "attempt" if name == "attempts" else name).label(name) for name in names]
    query = select(_stored_bytes(), *columns).where(Instance.id.in_(keys), due, ~_holds_gpus())
    query = query.order_by(Instance.id).with_for_update(skip_locked=True)
    rows = session.execute(query).mappings().all()
    if records := [{name: each[name] for name in names} for each in rows if each["attempts"]]:
        session.execute(insert(InstanceRecord), records)
    purged = [each["id"] for each in rows]
    session.execute(delete(Instance).where(Instance.id.in_(purged)))
    freed: Counter[str] = Counter()
    for each in rows:
        freed[each["project_id"]] += each["stored_bytes"]
    storage.subtract(session, freed)
    return purged


class _Groups(Sweep):
    """Deleted groups whose members are purged."""

    def __init__(self, before: datetime) -> None:
        member = exists().where(Instance.group_id == InstanceGroup.id)
        self._due = (InstanceGroup.deleted_at < before) & ~member

    def find(self, session: Session, most: int) -> Sequence[str]:
        return session.scalars(select(InstanceGroup.id).where(self._due).limit(most)).all()

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        group = InstanceGroup
        stored = func.length(cast(group.template, String)) + func.length(cast(group.labels, String))
        statement = delete(group).where(group.id.in_(keys), self._due).returning(group.project_id, stored)
        rows = session.execute(statement).all()
        freed: Counter[str] = Counter()
        for project_id, size in rows:
            freed[project_id] += size
        storage.subtract(session, freed)
        return len(rows)


_PROJECT_TABLES = (
    Allocation, InstanceRecord, InstanceGroup, Reservation, ApiKey, Member, Secret, Registry, Template,
    Webhook, Instance, Volume,
)  # fmt: skip


class _Projects(Sweep):
    """Deleted projects that nothing refers to, which are those that never had a placed instance."""

    def __init__(self, before: datetime) -> None:
        referred = or_(*(exists().where(table.project_id == Project.id) for table in _PROJECT_TABLES))
        self._due = (Project.deleted_at < before) & ~referred

    def find(self, session: Session, most: int) -> Sequence[str]:
        return session.scalars(select(Project.id).where(self._due).limit(most)).all()

    def remove(self, session: Session, keys: Sequence[str]) -> int:
        due = session.scalars(select(Project.id).where(Project.id.in_(keys), self._due)).all()
        session.execute(delete(ProjectUsage).where(ProjectUsage.project_id.in_(due)))
        storage.forget(session, due)
        session.execute(delete(Project).where(Project.id.in_(due)))
        return len(due)


class _Events(_History):
    """Expired events, ordered by `seq`."""

    kind = "events"

    def __init__(self, before: datetime, horizons: Horizons) -> None:
        super().__init__(before, horizons)
        self._after: int | None = 0

    def find(self, session: Session, most: int) -> Sequence[int]:
        while self._after is not None:
            expired, self._after = events.expired(session, self._before, self._after, most)
            if found := self._within_horizon(expired):
                return found
        return ()

    def remove(self, session: Session, keys: Sequence[int]) -> int:
        return events.forget(session, keys)
