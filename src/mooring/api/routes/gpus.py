"""`/v1/gpus` and `/v1/instance-types`: GPUs, their metrics, and the instance types they allow."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views import gpu_health as health_views
from mooring.api.views import gpus as gpu_views
from mooring.control.idempotency import StoredAnswer
from mooring.control.nodes import gpus, instance_types
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import GpuLost, NoSample
from mooring_client.schemas.gpus import Health, Sample
from mooring_client.schemas.nodes import Gpu, GpuIncidentList, GpuList, InstanceTypeList
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1", tags=["gpus"], route_class=StrictRoute)


class GpuQuery(pagination.PageQuery):
    node_id: Annotated[Text | None, Field(max_length=64)] = None
    health: Health | None = None
    samples: Annotated[bool, Field(description="show the newest metrics of each GPU too")] = False


@router.get("/gpus", response_model=GpuList, responses=errors(), operation_id="list_gpus")
def list_gpus(context: Ctx, access: CurrentAccess, params: Annotated[GpuQuery, Query()]) -> Response:
    """List GPUs. Each shows its health and the instances that use it."""
    query = select(tables.Gpu).join(tables.Node).where(tables.Node.deleted_at.is_(None))
    query = pagination.matching(query, params, tables.Gpu.node_id, tables.Gpu.health)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Gpu.uuid, params, secret)
        items = gpu_views.gpus(session, access, [row[0] for row in rows], sampled=params.samples)
        content = {"items": items, "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/gpus/{uuid}", response_model=Gpu, responses=errors(), operation_id="get_gpu")
def get_gpu(uuid: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a GPU. Shows its health and the instances that use it."""
    with context.database.read() as session:
        return responses.respond(_answer(session, access, gpus.get(session, uuid)))


def _answer(session: Session, access: Access, row: tables.Gpu) -> StoredAnswer:
    return responses.json_answer(gpu_views.gpus(session, access, [row])[0])


@router.get(
    "/gpus/{uuid}/incidents",
    response_model=GpuIncidentList,
    responses=errors(),
    operation_id="list_gpu_incidents",
)
def list_gpu_incidents(
    uuid: str, context: Ctx, access: CurrentAccess, params: Annotated[pagination.PageQuery, Query()]
) -> Response:
    """List GPU incidents. Newest first; only the project concerned sees an application fault."""
    key = tables.GpuIncident.id
    with context.database.read() as session:
        query = health_views.visible_incidents(access, gpus.get(session, uuid).uuid)
        rows, cursor = pagination.page(session, query, key, params, context.identity.cursor_secret)
    items = [health_views.incident(access, row[0]) for row in rows]
    return responses.respond(responses.json_answer({"items": items, "next_cursor": cursor}))


@router.get(
    "/gpus/{uuid}/metrics", response_model=Sample, responses=errors(NoSample), operation_id="get_gpu_metrics"
)
def get_gpu_metrics(uuid: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get GPU metrics. Returns the newest sample; values that the GPU does not support are null."""
    with context.database.read() as session:
        row = gpus.get(session, uuid)
        gpus.require_visible_metrics(session, access, row.uuid)
        found = gpu_views.samples(session, access, [row.uuid])
    if not found:
        raise NoSample(f"the node of {uuid} reports no metrics; is it reachable?")
    return responses.respond(responses.json_answer(found[0]))


@router.post("/gpus/{uuid}/clear", response_model=Gpu, responses=errors(GpuLost), operation_id="clear_gpu")
def clear_gpu(uuid: str, context: Ctx, call: CurrentCall) -> Response:
    """Clear a GPU. Ends its quarantine, so that it can be allocated again."""

    def act(session: Session) -> StoredAnswer:
        return _answer(session, call.access, gpus.clear(session, call.access, uuid))

    return transactions.idempotent(context, call, act)


@router.get(
    "/instance-types", response_model=InstanceTypeList, responses=errors(), operation_id="list_instance_types"
)
def list_instance_types(context: Ctx, access: CurrentAccess) -> Response:
    """List instance types. Each is a GPU model with a count or MIG profile, and how many could start now."""
    with context.database.read() as session:
        shapes = instance_types.derive(session, context.scheduler_cache, access)
    items = [gpu_views.instance_type(shape) for shape in shapes]
    return responses.respond(responses.json_answer({"items": items, "next_cursor": None}))
