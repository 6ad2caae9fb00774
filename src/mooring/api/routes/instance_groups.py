"""`/v1/instance-groups`: instances that are placed together and reach one another by name."""

from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import Field
from pydantic_core import to_json
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess, count_request
from mooring.api.auth.rules import IMMEDIATE_EXTRA
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.responses import IfMatch
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import ADMISSION, SPEC, errors
from mooring.api.routes.instances import BY_USER
from mooring.api.views import explanations
from mooring.api.views import instance_groups as group_views
from mooring.api.views.rendered import count_fitting
from mooring.auth.rate_limits import ActionClass
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import instance_groups
from mooring.control.instances.waiting_reasons import waiting_reason
from mooring.control.scheduling import explain
from mooring.control.tenants import projects
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import (
    HostNetworkNotAllowed,
    InsufficientCapacity,
    InvalidTransition,
    NameTaken,
    NotFound,
    ProjectRequired,
    TooManyQuestions,
    VolumeNotForGroups,
)
from mooring_client.schemas.instance_groups import (
    GroupExplanation,
    InstanceGroup,
    InstanceGroupCreate,
    InstanceGroupList,
)
from mooring_client.schemas.instances import InstanceStop
from mooring_client.schemas.text import LabelFilter, Text

router = APIRouter(prefix="/v1/instance-groups", tags=["instance groups"], route_class=StrictRoute)


class GroupQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None
    project_id: Annotated[Text | None, Field(max_length=64)] = None
    label: Annotated[list[LabelFilter], Field(max_length=16, description="`key:value`; all must match")] = []


@router.post(
    "",
    status_code=201,
    response_model=InstanceGroup,
    responses=errors(
        VolumeNotForGroups,
        HostNetworkNotAllowed,
        InsufficientCapacity,
        NameTaken,
        NotFound,
        ProjectRequired,
        *ADMISSION,
        *SPEC,
    ),
    operation_id="create_instance_group",
)
async def create_instance_group(
    request: Request, body: InstanceGroupCreate, context: Ctx, call: CurrentCall
) -> Response:
    """Create an instance group. Its `count` instances are placed all together or not at all.

    With `on_capacity: fail` in the template, they are placed at once or the request is rejected with 409.

    Each reaches the others as `<name>-<rank>`. Mooring sets the variables MASTER_ADDR, MASTER_PORT, RANK,
    NODE_RANK and WORLD_SIZE.
    """

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        row = instance_groups.create(session, call.access, project, body)
        if is_immediate:
            explain.place_now(session, context.scheduler_cache, instance_groups.members(session, row))
        return answer_of(context, session, row, 201)

    is_immediate = body.template.on_capacity == "fail"
    if is_immediate:
        count_request(request, call.access.caller, ActionClass.WRITE, IMMEDIATE_EXTRA)
    return await run_in_threadpool(transactions.idempotent, context, call, act)


def answer_of(
    context: Context, session: Session, row: tables.InstanceGroup, status: int = 200
) -> StoredAnswer:
    session.flush()
    content = group_views.group(session, row, context.scheduler_cache.positions)
    headers = responses.etag(content["version"])
    if status == 201:
        headers["Location"] = f"/v1/instance-groups/{row.id}"
    return responses.json_answer(content, status, headers)


@router.get("", response_model=InstanceGroupList, responses=errors(), operation_id="list_instance_groups")
def list_instance_groups(
    context: Ctx, access: CurrentAccess, params: Annotated[GroupQuery, Query()]
) -> Response:
    """List instance groups. Returns groups that are not deleted, newest first, with their members."""
    group = tables.InstanceGroup
    query = pagination.visible(select(group).where(group.deleted_at.is_(None)), group.project_id, access)
    query = pagination.matching(query, params, group.name, group.project_id)
    query = pagination.labelled(query, group.labels, params.label)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, group.id, params, secret)
        items = group_views.groups(session, [row[0] for row in rows], context.scheduler_cache.positions)
        # A template may have 256 KiB, so a page of large groups ends early.
        fitting = count_fitting([to_json(item) for item in items])
        if fitting < len(items):
            cursor = pagination.cursor_after(rows[fitting - 1], group.id, params, secret)
        content = {"items": items[:fitting], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get(
    "/{group_id}", response_model=InstanceGroup, responses=errors(), operation_id="get_instance_group"
)
def get_instance_group(group_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get an instance group. Shows the group and its members."""
    with context.database.read() as session:
        return responses.respond(answer_of(context, session, instance_groups.get(session, access, group_id)))


@router.delete(
    "/{group_id}",
    status_code=202,
    response_model=InstanceGroup,
    responses=errors(InvalidTransition),
    operation_id="delete_instance_group",
)
def delete_instance_group(group_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete an instance group. Stops and removes all members; then requests for it return 404."""

    def act(session: Session) -> StoredAnswer:
        row = instance_groups.delete(session, access, group_id, if_match)
        return answer_of(context, session, row, 202)

    return transactions.audited(context, access, act)


@router.post(
    "/{group_id}/stop",
    status_code=202,
    response_model=InstanceGroup,
    responses=errors(InvalidTransition),
    operation_id="stop_instance_group",
)
def stop_instance_group(
    group_id: str,
    context: Ctx,
    call: CurrentCall,
    body: Annotated[InstanceStop, Body()] = InstanceStop(),  # noqa: B008 - frozen
) -> Response:
    """Stop an instance group. All members get SIGTERM, and SIGKILL after `timeout_s`."""

    def act(session: Session) -> StoredAnswer:
        row = instance_groups.stop(session, call.access, group_id, body.timeout_s, BY_USER)
        return answer_of(context, session, row, 202)

    return transactions.idempotent(context, call, act)


@router.post(
    "/{group_id}/start",
    status_code=202,
    response_model=InstanceGroup,
    responses=errors(HostNetworkNotAllowed, InvalidTransition, *ADMISSION),
    operation_id="start_instance_group",
)
def start_instance_group(group_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Start an instance group. Queues all members of an ended group; each gets a new container."""

    def act(session: Session) -> StoredAnswer:
        row = instance_groups.start(session, call.access, group_id)
        return answer_of(context, session, row, 202)

    return transactions.idempotent(context, call, act)


@router.get(
    "/{group_id}/explain",
    response_model=GroupExplanation,
    responses=errors(TooManyQuestions),
    operation_id="explain_instance_group",
)
async def explain_instance_group(group_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Explain an instance group. Shows why it waits, what is ahead of it and its predicted start."""
    async with context.scheduler_turns.taken(access.caller):
        return await run_in_threadpool(_explained, context, access, group_id)


def _explained(context: Context, access: Access, group_id: str) -> Response:
    with context.database.read() as session:
        row = instance_groups.get(session, access, group_id)
        shown = group_views.group(session, row, context.scheduler_cache.positions)
        outcome = explain.explain_group(session, context.scheduler_cache, row.id)
        why = waiting_reason(outcome.unplaced).model_dump() if outcome.unplaced else shown["reason"]
        content = {"state": shown["state"], "reason": why}
        content |= explanations.forecast_fields(session, access, outcome)
    return responses.respond(responses.json_answer(content))
