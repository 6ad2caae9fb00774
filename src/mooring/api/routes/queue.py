"""`/v1/queue` and `/v1/cluster/fragmentation`: what is pending, and what fits on the free GPUs."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring.control.scheduling import queue
from mooring.core.access import Access
from mooring.db import tables
from mooring.db.types import now
from mooring.scheduler.model import PlanTime
from mooring.scheduler.packing.fragmentation import ModelFragmentation, fragmentation
from mooring_client.errors import TooManyQuestions
from mooring_client.schemas.base import Json, timestamp_of
from mooring_client.schemas.queue import Fragmentation, Queue
from mooring_client.schemas.spec import WHOLE_MILLI

router = APIRouter(prefix="/v1", tags=["queue"], route_class=StrictRoute)


@router.get("/queue", response_model=Queue, responses=errors(TooManyQuestions), operation_id="get_queue")
async def get_queue(
    context: Ctx, access: CurrentAccess, params: Annotated[pagination.PageQuery, Query()]
) -> Response:
    """Get the queue. Lists pending instances and groups in scheduling order, and the projects' shares.

    Entries of other projects show their size, but not their ids and names.
    """
    async with context.scheduler_turns.taken(access.caller):
        return await run_in_threadpool(_queue, context, access, params)


def _queue(context: Context, access: Access, params: pagination.PageQuery) -> Response:
    with context.database.read() as session:
        found = queue.view(session, context.scheduler_cache)
        page, cursor = pagination.page_of_items(
            found.entries, params, "queue", context.identity.cursor_secret
        )
        items = _entries(session, access, page)
    shares = [
        _standing(project_id, standing)
        for project_id, standing in found.standings.items()
        if access.caller.sees(project_id)
    ]
    return responses.respond(responses.json_answer({"items": items, "next_cursor": cursor, "shares": shares}))


def _entries(session: Session, access: Access, entries: Sequence[queue.QueueEntry]) -> list[Json]:
    own = [entry for entry in entries if access.caller.sees(entry.first.project_id)]
    instance, group = tables.Instance, tables.InstanceGroup
    query = select(instance.id, instance.name, instance.reason)
    rows = session.execute(query.where(instance.id.in_([entry.first.instance_id for entry in own])))
    first_rows = {row.id: row for row in rows}
    groups = select(group.id, group.name).where(
        group.id.in_([each.group_id for each in own if each.group_id])
    )
    names = {row.id: row.name for row in session.execute(groups)}
    return [_entry(entry, first_rows.get(entry.first.instance_id), names) for entry in entries]


def _entry(entry: queue.QueueEntry, first_row: object, group_names: dict[str, str]) -> Json:
    """`first_row` has the name and reason of the first member; it is None for entries of other projects."""
    first, forecast, group_id = entry.first, entry.forecast, entry.group_id
    own = first_row is not None
    return {
        "position": entry.position,
        "instance_id": first.instance_id if own and group_id is None else None,
        "group_id": group_id if own else None,
        "name": group_names.get(group_id) if group_id else getattr(first_row, "name", None),
        "project_id": first.project_id if own else None,
        "count": len(entry.members),
        "gpus": entry.gpus,
        "priority": first.priority,
        "waits_since": timestamp_of(min(member.queued_at for member in entry.members)),
        "reason": getattr(first_row, "reason", None),
        "behind": entry.behind,
        "starts_at": timestamp_of(forecast.starts_at) if forecast else None,
        "node_ids": list(forecast.node_ids) if forecast else [],
    }


def _standing(project_id: str, standing: queue.ProjectStanding) -> Json:
    project = standing.project
    guaranteed = project.guaranteed_gpu_milli
    return {
        "project_id": project_id,
        "weight": project.weight,
        "guaranteed_gpus": None if guaranteed is None else guaranteed // WHOLE_MILLI,
        "gpus": standing.gpus,
        "gpu_hours_of_late": round(project.used.gpu_s / 3600, 6),
        "dominant_share": round(standing.dominant_share, 6),
    }


@router.get(
    "/cluster/fragmentation",
    response_model=Fragmentation,
    responses=errors(),
    operation_id="get_fragmentation",
)
def get_fragmentation(context: Ctx, _access: CurrentAccess) -> Response:
    """Get fragmentation. Shows for each GPU model which sizes fit now and why free GPUs are unusable."""
    with context.database.read() as session:
        nodes = context.scheduler_cache.nodes(session)
    at = PlanTime(now().timestamp(), context.scheduler_cache.policy.start_overhead_s)
    items = [_model(model, found) for model, found in fragmentation(nodes, at).items()]
    return responses.respond(responses.json_answer({"items": items, "next_cursor": None}))


def _model(model: str, found: ModelFragmentation) -> Json:
    return {
        "model": model,
        "gpus": found.gpus,
        "gpus_free": found.gpus_free,
        "share_free": found.gpu_milli_free / WHOLE_MILLI,
        "fits": [{"count": count, "instances": fitting} for count, fitting in sorted(found.fits.items())],
        "shares_fit": [
            {"share": milli / WHOLE_MILLI, "instances": fitting}
            for milli, fitting in sorted(found.shares_fit.items())
        ],
        "stranded": [
            {"by": reason, "gpus": milli / WHOLE_MILLI}
            for reason, milli in sorted(found.stranded_milli.items())
        ],
        "mig": [{"mig_profile": profile, "free": free} for profile, free in sorted(found.mig_free.items())],
    }
