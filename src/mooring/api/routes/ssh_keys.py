"""`/v1/ssh-keys`, `/v1/ssh-certificates` and `/v1/me/ssh`: keys of SSH clients, and where they connect."""

from datetime import timedelta
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
from mooring.api.views.show import show
from mooring.control import gateway_keys
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import ssh_certificates, ssh_keys
from mooring.db import tables
from mooring_client.errors import (
    ExpiryInPast,
    InvalidPublicKey,
    NoMembership,
    NotFound,
    SshKeyExists,
    SshOff,
    TooManyRows,
)
from mooring_client.schemas.base import timestamp
from mooring_client.schemas.ssh_keys import (
    SshAddress,
    SshCertificate,
    SshCertificateCreate,
    SshKey,
    SshKeyCreate,
    SshKeyList,
)
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1", tags=["keys"], route_class=StrictRoute)

_DEFAULT_PORT = 22


class SshKeyQuery(pagination.PageQuery):
    project_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "/ssh-keys",
    status_code=201,
    response_model=SshKey,
    responses=errors(ExpiryInPast, InvalidPublicKey, NoMembership, NotFound, SshKeyExists, TooManyRows),
    operation_id="create_ssh_key",
)
def create_ssh_key(body: SshKeyCreate, context: Ctx, call: CurrentCall) -> Response:
    """Register an SSH key. It can do what the credential of this request can do, and ends with it."""

    def act(session: Session) -> StoredAnswer:
        row = ssh_keys.create(
            session, call.access, body.name, body.public_key, body.project_id, body.expires_at
        )
        return responses.json_answer(show(SshKey, row), 201, {"Location": f"/v1/ssh-keys/{row.id}"})

    return transactions.idempotent(context, call, act)


@router.get("/ssh-keys", response_model=SshKeyList, responses=errors(), operation_id="list_ssh_keys")
def list_ssh_keys(context: Ctx, access: CurrentAccess, params: Annotated[SshKeyQuery, Query()]) -> Response:
    """List SSH keys. Returns your own keys and, for owners, those of their projects, newest first."""
    query = select(tables.SshKey).where(ssh_keys.visible(access))
    query = pagination.matching(query, params, tables.SshKey.project_id)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.SshKey.id, params, secret)
        content = {"items": [show(SshKey, row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/ssh-keys/{key_id}", response_model=SshKey, responses=errors(), operation_id="get_ssh_key")
def get_ssh_key(key_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get an SSH key. Shows the fingerprint and the last use."""
    with context.database.read() as session:
        return responses.respond(responses.json_answer(show(SshKey, ssh_keys.get(session, access, key_id))))


@router.delete("/ssh-keys/{key_id}", status_code=204, responses=errors(), operation_id="delete_ssh_key")
def delete_ssh_key(key_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Delete an SSH key. Its open connections end within 5 seconds."""

    def act(session: Session) -> StoredAnswer:
        ssh_keys.delete(session, access, key_id)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)


@router.post(
    "/ssh-certificates",
    status_code=201,
    response_model=SshCertificate,
    responses=errors(InvalidPublicKey, NoMembership),
    operation_id="create_ssh_certificate",
)
def create_ssh_certificate(body: SshCertificateCreate, context: Ctx, call: CurrentCall) -> Response:
    """Get a short-lived SSH certificate. SSH clients use it beside the private key, and need no registration.

    It can do what the credential of this request can do, and ends with it. Connections outlast its expiry.
    """

    def act(session: Session) -> StoredAnswer:
        made = ssh_certificates.create(
            session, call.access, context.encryptor, body.public_key, timedelta(seconds=body.ttl_s)
        )
        content = {"certificate": made.text, "expires_at": timestamp(made.expires_at)}
        return responses.json_answer(content, 201)

    return transactions.idempotent(context, call, act)


@router.get("/me/ssh", response_model=SshAddress, responses=errors(SshOff), operation_id="get_my_ssh")
def get_my_ssh(context: Ctx, access: CurrentAccess) -> Response:
    """Get the SSH address. Shows where SSH clients connect, and the host key to pin."""
    settings = context.settings
    if settings.ssh_address is None:
        raise SshOff("this service has no SSH gateway: set MOORING_SSH_PORT and run mooring gateway")
    host, port = settings.ssh_address
    with context.database.read() as session:
        keys = gateway_keys.public_host_keys(session, context.encryptor)
    name = host if port == _DEFAULT_PORT else f"[{host}]:{port}"
    lines = "".join(f"{name} {key}\n" for key in keys)
    url = settings.gateway_url and f"ws{settings.gateway_url.rstrip('/').removeprefix('http')}/v1/ssh"
    content = {
        "host": host, "port": port, "host_keys": keys, "known_hosts": lines, "websocket_url": url
    }  # fmt: skip
    return responses.respond(responses.json_answer(content))
