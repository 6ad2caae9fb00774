"""Health, readiness and Prometheus metrics of the service."""

import asyncio
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from mooring.api.auth.authorization import AuthorizedRoute, CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import responses
from mooring.api.openapi.responses import errors
from mooring.control.nodes import metrics
from mooring_client.errors import DatabaseUnavailable, NotMigrated, WaitingForNode
from mooring_client.schemas.base import Status

# Less than load balancers and the image's health check wait.
_READINESS_TIMEOUT_S: Final = 3.0

router = APIRouter(tags=["service"], route_class=AuthorizedRoute)


@router.get("/healthz", response_model=Status, operation_id="get_health")
async def get_health() -> Response:
    """Get health. Returns `ok` while the process runs."""
    return responses.respond(responses.json_answer({"status": "ok"}))


@router.get(
    "/readyz",
    response_model=Status,
    responses=errors(NotMigrated, WaitingForNode),
    operation_id="get_readiness",
)
async def get_readiness(context: Ctx) -> Response:
    """Get readiness. The database must be migrated and accept writes; with `mooring up`, the node must have
    reported.
    """
    check = asyncio.wrap_future(context.write_probe.check())
    # A check may take as long as the database hangs. It is the same for all requests that wait for it.
    await asyncio.wait({check}, timeout=_READINESS_TIMEOUT_S)
    if not check.done():
        raise DatabaseUnavailable("the database does not answer in time")
    if (problem := check.result()) is not None:
        raise problem
    if len(context.reporting_nodes) < context.awaited_nodes:
        raise WaitingForNode("the local node has not reported yet")
    return responses.respond(responses.json_answer({"status": "ready"}))


class _FixedFamilies(Collector):
    """Adapts metric families to the collector that the Prometheus renderer needs."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


@router.get("/metrics", response_class=PlainTextResponse, responses=errors(), operation_id="get_metrics")
def get_metrics(context: Ctx, _access: CurrentAccess) -> Response:
    """Get metrics. Returns Prometheus text; needs `admin` or `metrics:read`, unless metrics are public."""
    return Response(_rendered(context), media_type=CONTENT_TYPE_LATEST)


def _rendered(context: Context) -> bytes:
    with context.database.read() as session:
        families = list(metrics.families(session))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FixedFamilies(families))
    return generate_latest(registry)
