"""`/v1/me`: the caller's identity and permissions."""

from fastapi import APIRouter
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import responses
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring.api.views import tenants as tenant_views
from mooring_client.schemas.api_keys import Me

router = APIRouter(prefix="/v1", tags=["keys"], route_class=StrictRoute)


@router.get("/me", response_model=Me, responses=errors(), operation_id="get_me")
def get_me(context: Ctx, access: CurrentAccess) -> Response:
    """Get the caller's identity. Shows the user or key, the projects and the permissions."""
    with context.database.read() as session:
        return responses.respond(responses.json_answer(tenant_views.me(session, access.caller)))
