"""Project quotas: counts allocated and pending resources, and rejects requests over a limit.

The rules are in `scheduler/feasibility/quotas.py`. Creates, starts and placements lock the project's row
(`lock`, `lock_for_instances`) before they count, so the counts stay true until the transaction ends.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, case, extract, func, literal, select, text
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.scheduling import requests
from mooring.db.tables import Allocation, Gpu, Instance, Project, Volume
from mooring.db.tables.work import ACTIVE
from mooring.db.types import JsonObject, UtcDateTime, now
from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import quotas as rules
from mooring.scheduler.feasibility.needs import matches
from mooring.scheduler.feasibility.quotas import CPUS, DISK, GPUS, INSTANCES, MEMORY, OF_MODEL
from mooring.scheduler.model import Over, Quota, Request
from mooring_client.errors import NotFound, QuotaExceeded
from mooring_client.schemas.base import Json, timestamp
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import State

Limits = Mapping[str, int]  # by quota name

PER_DAY = "gpu_hours_per_day"
PER_MONTH = "gpu_hours_per_month"
_COUNTED_BY_ROWS = frozenset({GPUS, INSTANCES})
VOLUMES = "volumes_mib"  # checked by control/volumes/volumes.py
_VOLUMES = select(func.sum(Volume.size_mib))
_SHOWN = (GPUS, INSTANCES, CPUS, MEMORY, DISK)


def concurrent_limits(quotas: JsonObject) -> dict[str, int]:
    """A project's limits on concurrent resources, by name; CPUs and GPUs in thousandths."""
    by_model = quotas.get("gpus_by_model") or {}
    limits = {
        GPUS: _milli(quotas.get(GPUS)),
        **{f"{OF_MODEL}{model}": _milli(limit) for model, limit in by_model.items()},
        INSTANCES: quotas.get(INSTANCES),
        CPUS: _milli(quotas.get(CPUS)),
        MEMORY: quotas.get(MEMORY),
        DISK: quotas.get(DISK),
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _milli(amount: float | None) -> int | None:
    return None if amount is None else round(amount * 1000)


def _limits_hours(quotas: JsonObject) -> bool:
    return quotas.get(PER_DAY) is not None or quotas.get(PER_MONTH) is not None


def lock(session: Session, project_id: str, *, always: bool = False) -> Project:
    """The project; locked if it has limits on concurrent resources, or if `always` is set.

    Raises:
        NotFound: it has been deleted.
    """
    row = session.get(Project, project_id)
    if row is not None and (always or concurrent_limits(row.quotas)):
        row = locks.projects(session, [project_id]).get(project_id)
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no project {project_id}")
    return row


def require_within_quota(session: Session, row: Project, spec: InstanceSpec, count: int = 1) -> None:
    """Check that `count` new instances of this spec are within the quotas of a project from `lock`.

    Raises:
        QuotaExceeded: allocated, pending and new resources together exceed a limit.
    """
    if limits := concurrent_limits(row.quotas):
        (quota,) = _counted(session, {row.id: limits}).values()
        _require_room(quota, requests.of_spec(spec, row.id), count)


def _require_room(quota: Quota, request: Request, count: int = 1) -> None:
    if over := rules.over_when_queued(quota, request, count):
        raise exceeded(over)


def exceeded(over: Over) -> QuotaExceeded:
    """The error, with advice, and with `resets_at` if a quota of GPU-hours is used up."""
    advice = f"wait until {over.resets_at}" if over.resets_at else "stop or delete something"
    fields: Json = {"quota": over.quota, "limit": over.limit, "used": over.used, "asked": over.asked}
    if over.resets_at:
        fields["resets_at"] = over.resets_at
    return QuotaExceeded(f"{phrases.quota_is(over)}; {advice}, or ask an admin to raise the quota", **fields)


def with_request(session: Session, request: Request) -> Quota | None:
    """The project's quota with a new request counted; None if it has no quota.

    Raises:
        QuotaExceeded: the request exceeds it.
    """
    quota = of_projects(session, [request.project_id]).get(request.project_id)
    if quota is None:
        return None
    _require_room(quota, request)
    return rules.with_pending_request(quota, request)


def of_projects(session: Session, project_ids: Iterable[str]) -> dict[str, Quota]:
    """The quotas of those projects that have limits."""
    query = select(Project.id, Project.quotas).where(Project.id.in_(set(project_ids)))
    return _read(session, dict(session.execute(query).all()))


def lock_for_instances(session: Session, instance_ids: Iterable[str]) -> dict[str, Quota]:
    """Lock the instances' projects that have limits, and return their quotas."""
    of_them = select(Instance.project_id).where(Instance.id.in_(set(instance_ids)))
    query = select(Project.id, Project.quotas).where(Project.id.in_(of_them))
    limited = [project_id for project_id, quotas in session.execute(query) if _has_limits(quotas)]
    if not limited:
        return {}
    rows = locks.projects(session, limited)
    return _read(session, {row.id: row.quotas for row in rows.values()})


def _has_limits(quotas: JsonObject) -> bool:
    return bool(concurrent_limits(quotas)) or _limits_hours(quotas)


def _read(session: Session, quotas: Mapping[str, JsonObject]) -> dict[str, Quota]:
    limits = {key: concurrent_limits(stored) for key, stored in quotas.items() if _has_limits(stored)}
    counted = _counted(session, {project_id: each for project_id, each in limits.items() if each})
    at = now()
    hours = _gpu_hours(session, [key for key in limits if _limits_hours(quotas[key])], at)
    return {
        project_id: replace(
            counted.get(project_id, Quota({}, {}, {})),
            spent=_spent(quotas[project_id], hours[project_id], at) if project_id in hours else None,
        )
        for project_id in limits
    }


def usage(session: Session, row: Project) -> Json:
    """A project's allocated plus pending resources and its GPU-hours, by quota name."""
    models = {name: 0 for name in concurrent_limits(row.quotas) if name.startswith(OF_MODEL)}
    (quota,) = _counted(session, {row.id: {**dict.fromkeys(_SHOWN, 0), **models}}).values()
    total = {name: quota.placed.get(name, 0) + quota.waiting.get(name, 0) for name in quota.limits}
    hours = _gpu_hours(session, [row.id], now())[row.id]
    return {
        GPUS: _gpu_count(total[GPUS]),
        "gpus_by_model": {name.removeprefix(OF_MODEL): _gpu_count(total[name]) for name in models},
        INSTANCES: total[INSTANCES],
        CPUS: total[CPUS] / 1000,
        MEMORY: total[MEMORY],
        DISK: total[DISK],
        VOLUMES: int(session.scalar(_VOLUMES.where(Volume.project_id == row.id)) or 0),
        "gpu_hours_today": hours.today,
        "gpu_hours_this_month": hours.this_month,
    }


@dataclass(frozen=True, slots=True)
class UsedQuota:
    """A limit of a project and what counts against it, in the units of the API."""

    used: float
    limit: float


def used(session: Session, stored: Mapping[str, JsonObject]) -> dict[str, dict[str, UsedQuota]]:
    """What counts against each limit, by project and name of the quota.

    Args:
        stored: the quotas of projects, by project.
    """
    limits = {project_id: concurrent_limits(each) for project_id, each in stored.items()}
    counted = _counted(session, {project_id: each for project_id, each in limits.items() if each})
    hours = _gpu_hours(session, [key for key, each in stored.items() if _limits_hours(each)], now())
    found: dict[str, dict[str, UsedQuota]] = {project_id: {} for project_id in stored}
    for project_id, quota in counted.items():
        for name, limit in quota.limits.items():
            factor = 1000 if name in {GPUS, CPUS} or name.startswith(OF_MODEL) else 1
            total = quota.placed.get(name, 0) + quota.waiting.get(name, 0)
            found[project_id][name] = UsedQuota(total / factor, limit / factor)
    for project_id, each in hours.items():
        for name, used_hours in ((PER_DAY, each.today), (PER_MONTH, each.this_month)):
            if (most := stored[project_id].get(name)) is not None:
                found[project_id][name] = UsedQuota(used_hours, most)
    return found


def _gpu_count(milli: int) -> float:
    """In GPUs; whole GPUs as an integer, as earlier releases return them."""
    return milli // 1000 if milli % 1000 == 0 else milli / 1000


def _counted(session: Session, limits: Mapping[str, Limits]) -> dict[str, Quota]:
    """What counts against these limits, by project. Reads only what some limit needs."""
    placed: dict[str, Counter[str]] = defaultdict(Counter)
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for project_id, state, amounts in _sums(session, limits):
        if state is State.PENDING:
            waiting[project_id].update({name: amounts[name] for name in _COUNTED_BY_ROWS})
        else:
            placed[project_id].update(amounts)
    detailed = [key for key in limits if waiting[key][INSTANCES] and limits[key].keys() - _COUNTED_BY_ROWS]
    for request, count in _pending_alike(session, detailed):
        amounts = rules.fixed_amounts(limits[request.project_id], request)
        details = amounts.keys() - _COUNTED_BY_ROWS
        waiting[request.project_id].update({name: amounts[name] * count for name in details})
    by_model = [key for key in limits if any(name.startswith(OF_MODEL) for name in limits[key])]
    for project_id, model, milli in _allocated_by_model(session, by_model):
        for name in limits[project_id]:
            if name.startswith(OF_MODEL) and matches(name.removeprefix(OF_MODEL), model):
                placed[project_id][name] += int(milli)
    return {key: Quota(limits[key], placed[key], waiting[key]) for key in limits}


def _sums(session: Session, project_ids: Iterable[str]) -> Iterator[tuple[str, State, dict[str, int]]]:
    """Sums by project and state. The columns of a pending instance may be those of an earlier placement."""
    if not (ids := list(project_ids)):
        return
    columns = (Instance.gpu_milli, Instance.cpu_milli, Instance.memory_mib, Instance.disk_mib)
    sums = map(func.sum, columns)
    query = (
        select(Instance.project_id, Instance.state, func.count(), *sums)
        # The exact text of the index condition: otherwise SQLite does not use the index.
        .where(Instance.project_id.in_(ids), text(ACTIVE))
        .group_by(Instance.project_id, Instance.state)
    )
    for project_id, state, count, *amounts in session.execute(query):
        by_name = zip((GPUS, CPUS, MEMORY, DISK), amounts, strict=True)
        yield project_id, state, {INSTANCES: count, **{name: int(sum_ or 0) for name, sum_ in by_name}}


def _pending_alike(session: Session, project_ids: list[str]) -> Iterator[tuple[Request, int]]:
    """The pending requests of the projects. Equal requests are yielded once, with their number."""
    if not project_ids:
        return
    spec = Instance.spec
    asked = (
        Instance.project_id,
        spec["gpus"].as_string().label("gpus"),
        spec["cpus"].as_float().label("cpus"),
        spec["memory_mib"].as_integer().label("memory_mib"),
        spec["disk_mib"].as_integer().label("disk_mib"),
    )
    waiting = Instance.project_id.in_(project_ids), text(ACTIVE), Instance.state == State.PENDING
    each = select(*asked).where(*waiting).subquery()
    query = select(each, func.count()).group_by(*each.c)
    for project_id, gpus, cpus, memory_mib, disk_mib, count in session.execute(query):
        sizes = {"cpus": cpus, "memory_mib": memory_mib, "disk_mib": disk_mib}
        alike = {"gpus": json.loads(gpus or "null"), **sizes}
        yield requests.of_columns("", project_id, 0, alike), count


def _allocated_by_model(session: Session, project_ids: list[str]) -> Sequence[tuple[str, str, int]]:
    if not project_ids:
        return ()
    query = (
        select(Allocation.project_id, Gpu.model, func.sum(Allocation.milli))
        .join(Gpu, Gpu.uuid == Allocation.gpu_uuid)
        .where(
            Allocation.project_id.in_(project_ids),
            Allocation.to_at.is_(None),
            Allocation.lost_node_id.is_(None),
        )
        .group_by(Allocation.project_id, Gpu.model)
    )
    return session.execute(query).all()


@dataclass(frozen=True, slots=True)
class _Hours:
    """GPU-hours since the start of the UTC day and month."""

    today: float = 0.0
    this_month: float = 0.0


def _gpu_hours(session: Session, project_ids: list[str], at: datetime) -> dict[str, _Hours]:
    """Sums the ledger's intervals within the day and the month; a GPU share counts as its fraction."""
    if not project_ids:
        return {}
    today = at.replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    of_day, of_month = (
        func.sum(_seconds_since(session, begin, at) * Allocation.milli) / 1000.0 for begin in (today, month)
    )
    summed = (
        select(Allocation.project_id, of_day, of_month)
        .where(Allocation.project_id.in_(project_ids), Allocation.lost_node_id.is_(None))
        .group_by(Allocation.project_id)
    )
    used = dict.fromkeys(project_ids, (0.0, 0.0))
    # Two queries: with OR, SQLite would scan the whole ledger.
    for part in (Allocation.to_at.is_(None), Allocation.to_at > month):
        for project_id, day_s, month_s in session.execute(summed.where(part)):
            before_day_s, before_month_s = used[project_id]
            used[project_id] = before_day_s + float(day_s), before_month_s + float(month_s)
    return {
        project_id: _Hours(round(day_s / 3600, 6), round(month_s / 3600, 6))
        for project_id, (day_s, month_s) in used.items()
    }


def _seconds_since(session: Session, begin: datetime, at: datetime) -> ColumnElement[float]:
    """How long a GPU was allocated between `begin` and `at`."""
    first = literal(begin, UtcDateTime())
    last = literal(at, UtcDateTime())
    start = case((Allocation.from_at > first, Allocation.from_at), else_=first)
    end = case((Allocation.to_at < last, Allocation.to_at), else_=last)
    held = _epoch(session, end) - _epoch(session, start)
    return case((end > start, held), else_=0.0)


def _epoch(session: Session, at: ColumnElement[datetime]) -> ColumnElement[Any]:
    """Seconds since a fixed time, with fractions."""
    if session.get_bind().dialect.name == "postgresql":
        return extract("epoch", at)
    return func.julianday(at) * 86_400.0


def _spent(quotas: JsonObject, used: _Hours, at: datetime) -> Over | None:
    """The quota of GPU-hours that is used up, if any; of two the one that resets later."""
    today = at.replace(hour=0, minute=0, second=0, microsecond=0)
    next_month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    totals = (
        (PER_MONTH, used.this_month, next_month),
        (PER_DAY, used.today, today + timedelta(days=1)),
    )
    for name, hours, resets_at in totals:
        limit = quotas.get(name)
        if limit is not None and hours >= limit:
            return Over(name, limit, hours, None, timestamp(resets_at))
    return None
