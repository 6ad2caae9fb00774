"""`/v1/instances`: create, read, change, stop and delete instances."""

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query
from pydantic import Field
from pydantic_core import from_json
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess, CurrentLiveAccess, count_request, open_stream
from mooring.api.auth.rules import DRY_RUN_EXTRA, IMMEDIATE_EXTRA
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute, write_turn
from mooring.api.http.responses import IfMatch
from mooring.api.http.transactions import Call, CurrentCall
from mooring.api.openapi.responses import ADMISSION, SPEC, errors
from mooring.api.streaming import waiting
from mooring.api.views import explanations, rendered
from mooring.api.views import gpus as gpu_views
from mooring.api.views import instances as instance_views
from mooring.api.views.show import show
from mooring.auth.rate_limits import ActionClass
from mooring.control import events
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import admission, allocations, instances
from mooring.control.instances.waiting_reasons import waiting_reason
from mooring.control.scheduling import explain
from mooring.control.tenants import projects
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import (
    GpuReserved,
    InsufficientCapacity,
    InvalidTransition,
    MemberOfGroup,
    NameTaken,
    NodeNotAllowed,
    NotFound,
    PriorityNotAllowed,
    ProjectRequired,
    ReservedLabel,
    TooManyQuestions,
)
from mooring_client.schemas.events import Event, InstanceEvents
from mooring_client.schemas.instances import (
    DryRun,
    Explanation,
    Instance,
    InstanceCreate,
    InstanceList,
    InstancePatch,
    InstanceStop,
    MetricsList,
    WaitResult,
    WaitState,
)
from mooring_client.schemas.states import Reason, State
from mooring_client.schemas.text import LabelFilter, Text

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)

BY_USER = Reason(code="stopped_by_user", message="stopped at the user's request")
# Of the answer to a create; the answer after a wait has them too.
_KEPT_HEADERS = frozenset({"location", "idempotency-replayed"})


class InstanceQuery(pagination.PageQuery):
    state: State | None = None
    name: Annotated[Text | None, Field(max_length=63)] = None
    node_id: Annotated[Text | None, Field(max_length=64)] = None
    project_id: Annotated[Text | None, Field(max_length=64)] = None
    label: Annotated[list[LabelFilter], Field(max_length=16, description="`key:value`; all must match")] = []


@router.post(
    "",
    status_code=201,
    response_model=Instance,
    responses={
        200: {"model": DryRun, "description": "The result of a dry run: nothing was created."},
        **errors(
            InsufficientCapacity, NameTaken, NotFound, ProjectRequired, TooManyQuestions, *ADMISSION, *SPEC
        ),
    },
    operation_id="create_instance",
)
async def create_instance(
    request: Request,
    body: InstanceCreate,
    context: Ctx,
    call: CurrentCall,
    dry_run: Annotated[
        bool, Query(description="only report whether and where the instance would start now")
    ] = False,
    wait: Annotated[
        Literal["running"] | None,
        Query(description="answer once the instance runs, can no longer run, or `timeout_s` is over"),
    ] = None,
    timeout_s: Annotated[
        float, Query(ge=1, le=60, allow_inf_nan=False, description="of `wait`, in seconds")
    ] = 60,
) -> Response:
    """Create an instance. It runs one container with the requested GPUs.

    The instance is usually `pending` in the response. `wait=running` or `/wait` waits until it runs; `reason`
    says why it is pending. With `on_capacity: fail`, it is placed at once or rejected with 409.
    """
    # Before the instance exists: a 429 must not leave one behind.
    live = None if wait is None or dry_run else open_stream(request, call.access)
    created = await _create(request, body, context, call, dry_run=dry_run)
    if live is None or created.status_code != 201:
        return created
    waited = waiting.wait(context, live, from_json(bytes(created.body))["id"], State.RUNNING, timeout_s)
    try:
        found = (await waiting.while_connected(request, waited))["instance"]
    except NotFound:
        return created  # of a repeated request whose instance has been deleted since
    kept = {name: value for name, value in created.headers.items() if name in _KEPT_HEADERS}
    headers = responses.etag(found["version"]) | kept
    return responses.respond(responses.json_answer(found, 201, headers))


async def _create(
    request: Request, body: InstanceCreate, context: Context, call: Call, *, dry_run: bool
) -> Response:
    caller = call.access.caller
    if dry_run:
        count_request(request, caller, ActionClass.WRITE, DRY_RUN_EXTRA)
        async with context.scheduler_turns.taken(caller):
            return await run_in_threadpool(_dry_run, context, call.access, body)

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        row = instances.create(session, call.access, project, body)
        if body.on_capacity == "fail":
            explain.place_now(session, context.scheduler_cache, [row])
        return answer_of(context, session, row, 201)

    if body.on_capacity == "fail":
        count_request(request, caller, ActionClass.WRITE, IMMEDIATE_EXTRA)
        async with write_turn(context, caller):
            return await run_in_threadpool(transactions.idempotent, context, call, act)
    return await transactions.batched(context, call, act)


def _dry_run(context: Context, access: Access, body: InstanceCreate) -> Response:
    with context.database.read() as session:
        project = projects.for_new(session, access, body.project_id, context.identity.default_project_id)
        admission.require(session, project.id, body)
        admission.require_priority(session, access, project.id, body.priority)
        outcome = explain.dry_run(session, context.scheduler_cache, project.id, body)
        placed, why = outcome.placement, outcome.unplaced
        content = {
            "placeable": placed is not None,
            "node_id": placed.node_id if placed else None,
            "devices": gpu_views.devices_of(session, placed.allocations if placed else ()),
            "reason": waiting_reason(why).model_dump() if why else None,
            **explanations.forecast_fields(session, access, outcome),
        }
    return responses.respond(responses.json_answer(content))


def answer_of(context: Context, session: Session, row: tables.Instance, status: int = 200) -> StoredAnswer:
    headers = responses.etag(row.version)
    if status == 201:
        headers["Location"] = f"/v1/instances/{row.id}"
    positions = context.scheduler_cache.positions
    shown = instance_views.instance(session, row, positions, context.port_urls)
    return responses.json_answer(shown, status, headers)


@router.get("", response_model=InstanceList, responses=errors(), operation_id="list_instances")
async def list_instances(
    context: Ctx, access: CurrentAccess, params: Annotated[InstanceQuery, Query()]
) -> Response:
    """List instances. Returns instances that are not deleted, newest first."""
    page_key = access.projects, params.model_dump_json()
    page = await context.lists.read(page_key, partial(_page, context, access, params))
    return Response(page, media_type="application/json")


def _page(context: Context, access: Access, params: InstanceQuery) -> bytes:
    instance = tables.Instance
    query = rendered.page_columns().where(instance.deleted_at.is_(None))
    query = pagination.visible(query, instance.project_id, access)
    query = pagination.matching(
        query, params, instance.state, instance.name, instance.node_id, instance.project_id
    )
    query = pagination.labelled(query, instance.labels, params.label)
    with context.database.read() as session:
        return context.rendered.page(
            session, query, params, context.identity.cursor_secret, context.scheduler_cache.positions
        )


@router.get("/{instance_id}", response_model=Instance, responses=errors(), operation_id="get_instance")
def get_instance(instance_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get an instance. Shows its request, its state and its placement."""
    with context.database.read() as session:
        return responses.respond(answer_of(context, session, instances.get(session, access, instance_id)))


@router.patch(
    "/{instance_id}",
    response_model=Instance,
    responses=errors(GpuReserved, MemberOfGroup, NameTaken, PriorityNotAllowed, ReservedLabel),
    operation_id="update_instance",
)
def update_instance(
    instance_id: str, body: InstancePatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update an instance. Changes name, labels, priority or `max_duration_s` (null: no limit)."""
    changes = body.model_dump(exclude_unset=True)

    def act(session: Session) -> StoredAnswer:
        row = instances.patch(session, access, instance_id, changes, if_match)
        return answer_of(context, session, row)

    return transactions.audited(context, access, act)


@router.delete(
    "/{instance_id}",
    status_code=202,
    response_model=Instance,
    responses=errors(InvalidTransition, MemberOfGroup),
    operation_id="delete_instance",
)
async def delete_instance(
    instance_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Delete an instance. Stops and removes its container; then requests for it return 404."""

    def act(session: Session) -> StoredAnswer:
        with session.no_autoflush:  # write all rows of a batch in one flush
            row = instances.delete(session, access, instance_id, if_match)
            return answer_of(context, session, row, 202)

    return await transactions.batched_delete(context, access, instance_id, act)


@router.post(
    "/{instance_id}/stop",
    status_code=202,
    response_model=Instance,
    responses=errors(InvalidTransition, MemberOfGroup),
    operation_id="stop_instance",
)
def stop_instance(
    instance_id: str,
    context: Ctx,
    call: CurrentCall,
    body: Annotated[InstanceStop, Body()] = InstanceStop(),  # noqa: B008 - frozen
) -> Response:
    """Stop an instance. Sends SIGTERM, and SIGKILL after `timeout_s`.

    Its logs stay available until it is deleted or started again.
    """

    def act(session: Session) -> StoredAnswer:
        row = instances.stop(session, call.access, instance_id, body.timeout_s, BY_USER)
        return answer_of(context, session, row, 202)

    return transactions.idempotent(context, call, act)


@router.post(
    "/{instance_id}/start",
    status_code=202,
    response_model=Instance,
    responses=errors(InvalidTransition, MemberOfGroup, *ADMISSION),
    operation_id="start_instance",
)
def start_instance(instance_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Start an instance. Queues an ended instance; it gets a new container, maybe on another node."""

    def act(session: Session) -> StoredAnswer:
        row = instances.start(session, call.access, instance_id)
        return answer_of(context, session, row, 202)

    return transactions.idempotent(context, call, act)


@router.post(
    "/{instance_id}/restart",
    status_code=202,
    response_model=Instance,
    responses=errors(GpuReserved, InvalidTransition, MemberOfGroup, NodeNotAllowed, *ADMISSION),
    operation_id="restart_instance",
)
def restart_instance(instance_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Restart an instance. Replaces its container by a new one on the same GPUs."""

    def act(session: Session) -> StoredAnswer:
        row = instances.restart(session, call.access, instance_id)
        return answer_of(context, session, row, 202)

    return transactions.idempotent(context, call, act)


@router.get(
    "/{instance_id}/wait", response_model=WaitResult, responses=errors(), operation_id="wait_for_instance"
)
async def wait_for_instance(
    instance_id: str,
    request: Request,
    context: Ctx,
    live: CurrentLiveAccess,
    state: WaitState = "running",
    timeout_s: Annotated[float, Query(ge=1, le=60, allow_inf_nan=False, description="in seconds")] = 30,
) -> Response:
    """Wait for an instance. Returns when it has reached `state`, when it no longer can, or at the timeout."""
    waited = waiting.wait(context, live, instance_id, State(state), timeout_s)
    return responses.respond(responses.json_answer(await waiting.while_connected(request, waited)))


@router.get(
    "/{instance_id}/metrics",
    response_model=MetricsList,
    responses=errors(),
    operation_id="get_instance_metrics",
)
def get_instance_metrics(instance_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get instance metrics. Returns the newest sample of each of its GPUs."""
    with context.database.read() as session:
        row = instances.get(session, access, instance_id)
        allocated = allocations.of_instances(session, [row.id]).get(row.id, [])
        uuids = list(dict.fromkeys(each.gpu_uuid for each in allocated))
        items = gpu_views.samples(session, access, uuids)
    return responses.respond(responses.json_answer({"items": items}))


@router.get(
    "/{instance_id}/events",
    response_model=InstanceEvents,
    responses=errors(),
    operation_id="list_instance_events",
)
def list_instance_events(
    instance_id: str,
    context: Ctx,
    access: CurrentAccess,
    after: Annotated[int, Query(ge=0, lt=2**63, description="`seq` of the last event that you have")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
) -> Response:
    """List instance events. Returns those after a `seq`, oldest first."""
    with context.database.read() as session:
        row = instances.get(session, access, instance_id)
        found = events.page_of_instance(session, row.id, after=after, limit=limit)
        content = {"items": [show(Event, event) for event in found], "next_cursor": None}
    return responses.respond(responses.json_answer(content))


@router.get(
    "/{instance_id}/explain",
    response_model=Explanation,
    responses=errors(TooManyQuestions),
    operation_id="explain_instance",
)
async def explain_instance(instance_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Explain an instance. Shows why it is in its state.

    For a pending instance also why nodes refuse it, what is ahead of it, its predicted start and what fits.
    """
    async with context.scheduler_turns.taken(access.caller):
        return await run_in_threadpool(_explained, context, access, instance_id)


def _explained(context: Context, access: Access, instance_id: str) -> Response:
    with context.database.read() as session:
        row = instances.get(session, access, instance_id)
        outcome = explain.explain(session, context.scheduler_cache, row)
        why = waiting_reason(outcome.unplaced).model_dump() if outcome.unplaced else row.reason
        content = {"state": row.state, "reason": why, "node_id": row.node_id}
        content |= explanations.forecast_fields(session, access, outcome)
    return responses.respond(responses.json_answer(content))
