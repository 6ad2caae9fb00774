"""`/v1/docker-context`: the configuration of Docker clients."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import responses
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring_client.errors import DockerOff
from mooring_client.schemas.docker_context import DockerContext

router = APIRouter(prefix="/v1", tags=["keys"], route_class=StrictRoute)


@router.get(
    "/docker-context",
    response_model=DockerContext,
    responses=errors(DockerOff),
    operation_id="get_docker_context",
)
def get_docker_context(request: Request, context: Ctx, _access: CurrentAccess) -> Response:
    """Get the Docker configuration. Contains the API key of this request, in clear text."""
    settings = context.settings
    if not settings.docker_port:
        raise DockerOff(
            "this service accepts no Docker clients: set MOORING_DOCKER_PORT, and run mooring gateway"
        )
    # The service does not store keys, so this is the only place where it has one.
    headers = {"Authorization": request.headers["authorization"]}
    content = {"config.json": {"HttpHeaders": headers}, "host": settings.docker_url}
    return responses.respond(responses.json_answer(content))
