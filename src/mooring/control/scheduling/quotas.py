"""Quotas of projects: what is held, waited for and used up, and who is refused for it.

Reads what `scheduler/feasibility/quotas.py` decides by. The project's row is locked first, so the counts
stay true until the transaction ends; placements are guarded in the same way (`placement.assign`).
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
from mooring.core.errors import NotFound, QuotaExceeded
from mooring.core.instance.spec import InstanceSpec
from mooring.core.instance.state import State
from mooring.db.tables import Allocation, Gpu, Instance, Project
from mooring.db.tables.work import ACTIVE
from mooring.db.types import JsonObject, UtcDateTime, now
from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import quotas as rules
from mooring.scheduler.feasibility.needs import matches
from mooring.scheduler.feasibility.quotas import CPUS, DISK, GPUS, INSTANCES, MEMORY, OF_MODEL
from mooring.scheduler.model import Over, Quota, Request
from mooring.schemas.base import Json, timestamp

Limits = Mapping[str, int]

PER_DAY = "gpu_hours_per_day"
PER_MONTH = "gpu_hours_per_month"
_COUNTED_BY_ROWS = frozenset({GPUS, INSTANCES})
_SHOWN = (GPUS, INSTANCES, CPUS, MEMORY, DISK)


def limits_at_once(quotas: JsonObject) -> dict[str, int]:
    """A project's limits on what it holds at once, by name; CPUs and GPUs in milli."""
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
    """The project, locked if it has limits on what it holds.

    Raises:
        NotFound: it was deleted a moment ago.
    """
    row = session.get(Project, project_id)
    if row is not None and (always or limits_at_once(row.quotas)):
        row = locks.projects(session, [project_id]).get(project_id)
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no project {project_id}")
    return row


def require_within_quota(session: Session, row: Project, spec: InstanceSpec, count: int = 1) -> None:
    """Let something new, or several alike, wait in a project that `lock` gave, if its quotas have room.

    Raises:
        QuotaExceeded: with all of it the project would hold and wait for more than a limit.
    """
    if limits := limits_at_once(row.quotas):
        (quota,) = _counted(session, {row.id: limits}).values()
        _refuse(quota, requests.of_spec(spec, row.id), count)


def _refuse(quota: Quota, request: Request, count: int = 1) -> None:
    if over := rules.over_when_asked(quota, request, count):
        raise exceeded(over)


def exceeded(over: Over) -> QuotaExceeded:
    """The refusal: what to do, and `resets_at` for a running total."""
    advice = f"wait until {over.resets_at}" if over.resets_at else "stop or delete something"
    fields: Json = {"quota": over.quota, "limit": over.limit, "used": over.used, "asked": over.asked}
    if over.resets_at:
        fields["resets_at"] = over.resets_at
    return QuotaExceeded(f"{phrases.quota_is(over)}; {advice}, or ask an admin to raise the quota", **fields)


def as_if_asked(session: Session, request: Request) -> Quota | None:
    """Its project's quota if a request that is not made were; null: there is none.

    Raises:
        QuotaExceeded: it would be refused.
    """
    quota = of_projects(session, [request.project_id]).get(request.project_id)
    if quota is None:
        return None
    _refuse(quota, request)
    return rules.promised(quota, request)


def of_projects(session: Session, project_ids: Iterable[str]) -> dict[str, Quota]:
    """The quotas of those of the projects that have limits."""
    query = select(Project.id, Project.quotas).where(Project.id.in_(set(project_ids)))
    return _standing(session, dict(session.execute(query).all()))


def of_placed(session: Session, instance_ids: Iterable[str]) -> dict[str, Quota]:
    """The quotas of the instances' projects, which are locked if they have limits."""
    of_them = select(Instance.project_id).where(Instance.id.in_(set(instance_ids)))
    query = select(Project.id, Project.quotas).where(Project.id.in_(of_them))
    limited = [project_id for project_id, quotas in session.execute(query) if _limits(quotas)]
    if not limited:
        return {}
    rows = locks.projects(session, limited)
    return _standing(session, {row.id: row.quotas for row in rows.values()})


def _limits(quotas: JsonObject) -> bool:
    return bool(limits_at_once(quotas)) or _limits_hours(quotas)


def _standing(session: Session, quotas: Mapping[str, JsonObject]) -> dict[str, Quota]:
    limits = {project_id: limits_at_once(said) for project_id, said in quotas.items() if _limits(said)}
    counted = _counted(session, {project_id: said for project_id, said in limits.items() if said})
    moment = now()
    hours = _gpu_hours(session, [key for key in limits if _limits_hours(quotas[key])], moment)
    return {
        project_id: replace(
            counted.get(project_id, Quota({}, {}, {})),
            spent=_spent(quotas[project_id], hours[project_id], moment) if project_id in hours else None,
        )
        for project_id in limits
    }


def usage(session: Session, row: Project) -> Json:
    """What a project holds and waits for, and its GPU-hours; by the names of its quotas."""
    models = {name: 0 for name in limits_at_once(row.quotas) if name.startswith(OF_MODEL)}
    (quota,) = _counted(session, {row.id: {**dict.fromkeys(_SHOWN, 0), **models}}).values()
    held = {name: quota.placed.get(name, 0) + quota.waiting.get(name, 0) for name in quota.limits}
    hours = _gpu_hours(session, [row.id], now())[row.id]
    return {
        GPUS: _cards(held[GPUS]),
        "gpus_by_model": {name.removeprefix(OF_MODEL): _cards(held[name]) for name in models},
        INSTANCES: held[INSTANCES],
        CPUS: held[CPUS] / 1000,
        MEMORY: held[MEMORY],
        DISK: held[DISK],
        "gpu_hours_today": hours.today,
        "gpu_hours_this_month": hours.this_month,
    }


def _cards(milli: int) -> float:
    """Whole cards are a whole number, as they were before there were shares."""
    return milli // 1000 if milli % 1000 == 0 else milli / 1000


def _counted(session: Session, limits: Mapping[str, Limits]) -> dict[str, Quota]:
    """What counts against these limits, by project; nothing is asked that none of them needs."""
    placed: dict[str, Counter[str]] = defaultdict(Counter)
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for project_id, state, amounts in _sums(session, limits):
        if state is State.PENDING:
            waiting[project_id].update({name: amounts[name] for name in _COUNTED_BY_ROWS})
        else:
            placed[project_id].update(amounts)
    detailed = [key for key in limits if waiting[key][INSTANCES] and limits[key].keys() - _COUNTED_BY_ROWS]
    for request, count in _pending_alike(session, detailed):
        amounts = rules.wherever(limits[request.project_id], request)
        details = amounts.keys() - _COUNTED_BY_ROWS
        waiting[request.project_id].update({name: amounts[name] * count for name in details})
    by_model = [key for key in limits if any(name.startswith(OF_MODEL) for name in limits[key])]
    for project_id, model, milli in _held_models(session, by_model):
        for name in limits[project_id]:
            if name.startswith(OF_MODEL) and matches(name.removeprefix(OF_MODEL), model):
                placed[project_id][name] += int(milli)
    return {key: Quota(limits[key], placed[key], waiting[key]) for key in limits}


def _sums(session: Session, project_ids: Iterable[str]) -> Iterator[tuple[str, State, dict[str, int]]]:
    """What a pending instance will be given is not in the columns, which may tell of an earlier placement."""
    if not (ids := list(project_ids)):
        return
    columns = (Instance.gpu_milli, Instance.cpu_milli, Instance.memory_mib, Instance.disk_mib)
    sums = map(func.sum, columns)
    query = (
        select(Instance.project_id, Instance.state, func.count(), *sums)
        # As the index has it, word for word: SQLite would not see that it may use it.
        .where(Instance.project_id.in_(ids), text(ACTIVE))
        .group_by(Instance.project_id, Instance.state)
    )
    for project_id, state, count, *amounts in session.execute(query):
        of_columns = zip((GPUS, CPUS, MEMORY, DISK), amounts, strict=True)
        yield project_id, state, {INSTANCES: count, **{name: int(of or 0) for name, of in of_columns}}


def _pending_alike(session: Session, project_ids: list[str]) -> Iterator[tuple[Request, int]]:
    """What is pending in the projects: a request for all that ask for the same, and how many they are."""
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


def _held_models(session: Session, project_ids: list[str]) -> Sequence[tuple[str, str, int]]:
    if not project_ids:
        return ()
    query = (
        select(Allocation.project_id, Gpu.model, func.sum(Allocation.milli))
        .join(Gpu, Gpu.uuid == Allocation.gpu_uuid)
        .where(Allocation.project_id.in_(project_ids), Allocation.to_at.is_(None))
        .group_by(Allocation.project_id, Gpu.model)
    )
    return session.execute(query).all()


@dataclass(frozen=True, slots=True)
class _Hours:
    """GPU-hours since the UTC day and the UTC month began."""

    today: float = 0.0
    this_month: float = 0.0


def _gpu_hours(session: Session, project_ids: list[str], moment: datetime) -> dict[str, _Hours]:
    """Summed over the ledger's intervals, as far as they lie in day and month; a share counts as a part."""
    if not project_ids:
        return {}
    today = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    of_day, of_month = (
        func.sum(_seconds_since(session, begin, moment) * Allocation.milli) / 1000.0
        for begin in (today, month)
    )
    summed = (
        select(Allocation.project_id, of_day, of_month)
        .where(Allocation.project_id.in_(project_ids))
        .group_by(Allocation.project_id)
    )
    used = dict.fromkeys(project_ids, (0.0, 0.0))
    # One after the other: with OR between them SQLite would read the ledger from its beginning.
    for part in (Allocation.to_at.is_(None), Allocation.to_at > month):
        for project_id, day_s, month_s in session.execute(summed.where(part)):
            before_day_s, before_month_s = used[project_id]
            used[project_id] = before_day_s + float(day_s), before_month_s + float(month_s)
    return {
        project_id: _Hours(round(day_s / 3600, 6), round(month_s / 3600, 6))
        for project_id, (day_s, month_s) in used.items()
    }


def _seconds_since(session: Session, begin: datetime, moment: datetime) -> ColumnElement[float]:
    """How long a GPU was held after `begin`, and until now at most."""
    first = literal(begin, UtcDateTime())
    last = literal(moment, UtcDateTime())
    start = case((Allocation.from_at > first, Allocation.from_at), else_=first)
    end = case((Allocation.to_at < last, Allocation.to_at), else_=last)
    held = _epoch(session, end) - _epoch(session, start)
    return case((end > start, held), else_=0.0)


def _epoch(session: Session, moment: ColumnElement[datetime]) -> ColumnElement[Any]:
    """Seconds, with their fractions, since some moment that is always the same."""
    if session.get_bind().dialect.name == "postgresql":
        return extract("epoch", moment)
    return func.julianday(moment) * 86_400.0


def _spent(quotas: JsonObject, used: _Hours, moment: datetime) -> Over | None:
    """The running total that is used up; of two the one that lasts longer."""
    today = moment.replace(hour=0, minute=0, second=0, microsecond=0)
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
