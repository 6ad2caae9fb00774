"""`/v1/instances/{id}/ports/{port}/links`: links with which a browser reaches a port."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.context import Ctx
from mooring.api.http import responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import port_links
from mooring_client.errors import NoMembership, NotProxied, ProxyOff, TooManyRows
from mooring_client.schemas.base import timestamp
from mooring_client.schemas.port_links import CreatedPortLink, PortLinkCreate

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)


@router.post(
    "/{instance_id}/ports/{port}/links",
    status_code=201,
    response_model=CreatedPortLink,
    responses=errors(NoMembership, NotProxied, ProxyOff, TooManyRows),
    operation_id="create_port_link",
)
def create_port_link(
    instance_id: str,
    port: Annotated[int, Path(ge=1, le=65_535)],
    body: PortLinkCreate,
    context: Ctx,
    call: CurrentCall,
) -> Response:
    """Make a link to a port, for browsers. The link of a private port works once, and signs the browser in.

    The link of a port with `auth: token` works until it expires. Both can do what the credential of this
    request can do, and end with it.
    """
    urls = context.port_urls
    if urls is None:
        raise ProxyOff("this service has no port proxy: set MOORING_PROXY_PORT and run mooring gateway")

    def act(session: Session) -> StoredAnswer:
        made = port_links.create(
            session, call.access, context.encryptor, urls, instance_id, port, timedelta(seconds=body.ttl_s)
        )
        content = {"url": made.url, "expires_at": timestamp(made.expires_at)}
        return responses.json_answer(content, 201, encrypted=True)

    return transactions.idempotent(context, call, act)
