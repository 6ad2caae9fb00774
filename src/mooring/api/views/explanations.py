"""Explanations of pending instances, without the details of projects that the caller may not see."""

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.scheduling import explain
from mooring.control.scheduling.evaluation import Outcome
from mooring.core.access import Access
from mooring.db import tables
from mooring.scheduler.model import Running
from mooring_client.schemas.base import Json, timestamp_of
from mooring_client.schemas.spec import WHOLE_MILLI


def forecast_fields(session: Session, access: Access, outcome: Outcome) -> Json:
    """Return the fields of `schemas.instances.Forecast`, and the refusals."""
    awaited = _awaited(outcome)
    own = [each for each in awaited if access.caller.sees(each.project_id)]
    named = {each.instance_id for each in outcome.ahead} | {each.instance_id for each in own}
    rows = _visible_rows(session, access, named)
    forecast = outcome.forecast
    return {
        "queue_position": outcome.position,
        "ahead": [_ahead(each.because, rows.get(each.instance_id)) for each in outcome.ahead],
        "starts_at": timestamp_of(forecast.starts_at) if forecast else None,
        "start_node_ids": list(forecast.node_ids) if forecast else [],
        "waits_for": [
            {
                "instance_id": each.instance_id,
                "name": rows[each.instance_id].name,
                "ends_at": timestamp_of(each.ends_at),
            }
            for each in own
            if each.instance_id in rows
        ],
        "waits_for_others": len(awaited) - len(own),
        "would_fit": _would_fit(outcome),
        "refusals": [explain.refusal_fields(refusal) for refusal in outcome.refusals],
    }


def _awaited(outcome: Outcome) -> list[Running]:
    if outcome.forecast is None or outcome.snapshot is None:
        return []
    wanted = frozenset(outcome.forecast.waits_for)
    nodes = outcome.snapshot.nodes if wanted else ()
    return [running for node in nodes for running in node.running if running.instance_id in wanted]


def _visible_rows(
    session: Session, access: Access, instance_ids: Collection[str]
) -> dict[str, tables.Instance]:
    query = select(tables.Instance).where(tables.Instance.id.in_(instance_ids))
    return {row.id: row for row in session.scalars(query) if access.caller.sees(row.project_id)}


def _ahead(because: str, row: tables.Instance | None) -> Json:
    return {
        "instance_id": row.id if row else None,
        "group_id": row.group_id if row else None,
        "name": row.name if row else None,
        "because": because,
    }


def _would_fit(outcome: Outcome) -> Json | None:
    fits = outcome.alternatives
    if fits is None:
        return None
    return {
        "max_count_now": fits.max_count_now,
        "models_now": list(fits.models_now),
        "max_share_now": None if fits.share_milli_now is None else fits.share_milli_now / WHOLE_MILLI,
        "without_same_numa": fits.without_same_numa,
        "max_duration_s": outcome.max_duration_now_s,
    }
