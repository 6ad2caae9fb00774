"""`/v1/nodes` and `/v1/join-tokens`: nodes and how they join."""

from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.responses import IfMatch, etag
from mooring.api.http.transactions import Call, CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views import nodes as node_views
from mooring.control.idempotency import StoredAnswer
from mooring.control.nodes import joins, nodes
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import FactsChangedAgain, GpuInUse, NodeInUse, UnknownProject
from mooring_client.schemas.base import timestamp
from mooring_client.schemas.nodes import (
    Approve,
    Drain,
    JoinToken,
    JoinTokenCreate,
    Node,
    NodeList,
    NodePatch,
)
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1", tags=["nodes"], route_class=StrictRoute)


class NodeQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None


@router.get("/nodes", response_model=NodeList, responses=errors(), operation_id="list_nodes")
def list_nodes(context: Ctx, access: CurrentAccess, params: Annotated[NodeQuery, Query()]) -> Response:
    """List nodes. Returns nodes with their GPUs, newest first."""
    query = select(tables.Node).where(tables.Node.deleted_at.is_(None))
    query = pagination.matching(query, params, tables.Node.name)
    with context.database.read() as session:
        rows, cursor = pagination.page(session, query, tables.Node.id, params, context.identity.cursor_secret)
        items = node_views.nodes(session, access, [row[0] for row in rows])
    return responses.respond(responses.json_answer({"items": items, "next_cursor": cursor}))


@router.get("/nodes/{node_id}", response_model=Node, responses=errors(), operation_id="get_node")
def get_node(node_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a node. Shows its state, its GPUs and its free resources."""
    with context.database.read() as session:
        return responses.respond(_answer(session, access, nodes.get(session, node_id)))


def _answer(session: Session, access: Access, row: tables.Node, status: int = 200) -> StoredAnswer:
    session.flush()
    return responses.json_answer(node_views.nodes(session, access, [row])[0], status, etag(row.version))


@router.patch(
    "/nodes/{node_id}", response_model=Node, responses=errors(UnknownProject), operation_id="update_node"
)
def update_node(
    node_id: str, body: NodePatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a node. Reserves it for some projects or opens it to all; running instances continue."""
    changes = body.model_dump(mode="json", exclude_unset=True)

    def act(session: Session) -> StoredAnswer:
        return _answer(session, access, nodes.patch(session, access, node_id, changes, if_match))

    return transactions.audited(context, access, act)


@router.post("/nodes/{node_id}/cordon", response_model=Node, responses=errors(), operation_id="cordon_node")
def cordon_node(node_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Cordon a node. No new instances are placed on it; running ones continue."""
    return _set_cordoned(context, call, node_id, cordoned=True)


def _set_cordoned(context: Context, call: Call, node_id: str, *, cordoned: bool) -> Response:
    def act(session: Session) -> StoredAnswer:
        return _answer(session, call.access, nodes.cordon(session, call.access, node_id, cordoned=cordoned))

    return transactions.idempotent(context, call, act)


@router.post(
    "/nodes/{node_id}/uncordon", response_model=Node, responses=errors(), operation_id="uncordon_node"
)
def uncordon_node(node_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Uncordon a node. New instances are placed on it again. Also ends a drain."""
    return _set_cordoned(context, call, node_id, cordoned=False)


@router.post("/nodes/{node_id}/drain", response_model=Node, responses=errors(), operation_id="drain_node")
def drain_node(
    node_id: str,
    context: Ctx,
    call: CurrentCall,
    body: Annotated[Drain, Body()] = Drain(),  # noqa: B008 - frozen
) -> Response:
    """Drain a node. No new instances are placed on it; its instances are stopped at the deadline."""

    def act(session: Session) -> StoredAnswer:
        return _answer(session, call.access, nodes.drain(session, call.access, node_id, body.deadline_s))

    return transactions.idempotent(context, call, act)


@router.post(
    "/nodes/{node_id}/approve",
    response_model=Node,
    responses=errors(FactsChangedAgain, GpuInUse),
    operation_id="approve_node",
)
def approve_node(
    node_id: str,
    context: Ctx,
    call: CurrentCall,
    body: Annotated[Approve, Body()] = Approve(),  # noqa: B008 - frozen
) -> Response:
    """Approve a node. Accepts the facts that it now reports (`facts_changed`).

    A GPU that is approved for another node moves to this one.
    """

    def act(session: Session) -> StoredAnswer:
        return _answer(session, call.access, nodes.approve(session, call.access, node_id, body.difference_id))

    return transactions.idempotent(context, call, act)


@router.post(
    "/nodes/{node_id}/renew-credential",
    status_code=202,
    response_model=Node,
    responses=errors(),
    operation_id="renew_credential",
)
def renew_credential(node_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Renew a node credential. The agent fetches a new one; the old one works until the new one is used."""

    def act(session: Session) -> StoredAnswer:
        return _answer(session, call.access, nodes.request_renewal(session, call.access, node_id), 202)

    return transactions.idempotent(context, call, act)


@router.delete("/nodes/{node_id}", status_code=204, responses=errors(NodeInUse), operation_id="delete_node")
def delete_node(
    node_id: str,
    context: Ctx,
    access: CurrentAccess,
    force: Annotated[bool, Query(description="declare the machine dead: its instances fail")] = False,
) -> Response:
    """Delete a node. Fails while the node has instances, unless `force` declares it dead."""

    def act(session: Session) -> StoredAnswer:
        nodes.delete(session, access, node_id, force=force)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)


@router.post(
    "/join-tokens",
    status_code=201,
    response_model=JoinToken,
    responses=errors(),
    operation_id="create_join_token",
)
def create_join_token(body: JoinTokenCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a join token. It admits one machine, once: `MOORING_JOIN_TOKEN=… mooring agent`."""

    def act(session: Session) -> StoredAnswer:
        token, secret = joins.create_join_token(session, call.access, body.ttl_s, body.node_name)
        content = {
            "id": token.id,
            "token": secret,
            "node_name": token.node_name,
            "expires_at": timestamp(token.expires_at),
        }
        return responses.json_answer(content, 201, encrypted=True)

    return transactions.idempotent(context, call, act)
