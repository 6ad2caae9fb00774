"""Health, readiness and Prometheus metrics of the service."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import PlainTextResponse, Response

from mooring.api.auth.authorization import AuthorizedRoute, CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import responses
from mooring.api.openapi.responses import errors
from mooring.control.nodes import metrics
from mooring.core.errors import DatabaseUnavailable, NotMigrated, WaitingForNode
from mooring.db import migrate
from mooring.schemas.base import Answer

router = APIRouter(tags=["service"], route_class=AuthorizedRoute)


class Status(Answer):
    status: str


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
def get_readiness(context: Ctx) -> Response:
    """Get readiness. The database must be migrated and, with `mooring up`, the node must have reported."""
    try:
        at, wanted = migrate.current(context.database.engine), migrate.newest()
    except SQLAlchemyError as error:
        raise DatabaseUnavailable("the database does not answer") from error
    if at != wanted:
        raise NotMigrated(f"the database is at revision {at}, not {wanted}; run: mooring db upgrade")
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
