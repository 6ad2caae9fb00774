"""PUT of all fields: of instances and volumes by id, and of all that can be applied by name."""

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess, count_request
from mooring.api.auth.rules import IMMEDIATE_EXTRA
from mooring.api.context import Context, Ctx
from mooring.api.http import applying
from mooring.api.http.applying import DOCUMENTED_CHANGE, DryRunOption, documented, require_same_name
from mooring.api.http.body import StrictRoute
from mooring.api.http.responses import IfMatch
from mooring.api.openapi.responses import ADMISSION, SPEC, errors
from mooring.api.routes import instance_groups as group_routes
from mooring.api.routes import instances as instance_routes
from mooring.api.routes import projects as project_routes
from mooring.api.routes import reservations as reservation_routes
from mooring.api.routes import volumes as volume_routes
from mooring.api.routes import webhooks as webhook_routes
from mooring.auth.rate_limits import ActionClass
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import apply_groups, apply_instances, instance_groups
from mooring.control.scheduling import apply_reservations, explain
from mooring.control.tenants import apply_projects, projects
from mooring.control.volumes import apply_volumes
from mooring.control.webhooks import apply_webhooks, webhooks
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import (
    BadPeriod,
    BeingDeleted,
    GpuReserved,
    HostNetworkNotAllowed,
    InsufficientCapacity,
    InvalidTransition,
    MailOff,
    MemberOfGroup,
    NameTaken,
    NfsNotAllowed,
    NodeSelectorConflict,
    NotFound,
    PriorityNotAllowed,
    ProjectRequired,
    QuotaExceeded,
    RequiresReplacement,
    TooManyRows,
    VolumeNotForGroups,
    VolumeSizeFixed,
    WebhookUrlNotAllowed,
)
from mooring_client.schemas.instance_groups import LONGEST_NAME, InstanceGroup, InstanceGroupApply
from mooring_client.schemas.instances import Instance, InstanceApply
from mooring_client.schemas.projects import Project, ProjectApply
from mooring_client.schemas.reservations import Reservation, ReservationApply
from mooring_client.schemas.text import DNS_LABEL, Name
from mooring_client.schemas.volumes import Volume, VolumeApply
from mooring_client.schemas.webhooks import Webhook, WebhookApply

router = APIRouter(prefix="/v1", route_class=StrictRoute)

PathName = Annotated[Name, Path()]
GroupName = Annotated[Name, Field(max_length=LONGEST_NAME, pattern=DNS_LABEL), Path()]


@router.put(
    "/instances/{instance_id}",
    response_model=Instance,
    responses={
        **DOCUMENTED_CHANGE,
        **errors(
            BeingDeleted,
            GpuReserved,
            MemberOfGroup,
            NameTaken,
            PriorityNotAllowed,
            RequiresReplacement,
            *SPEC,
        ),
    },
    operation_id="put_instance",
    tags=["instances"],
)
async def put_instance(
    instance_id: str, body: InstanceApply, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Apply all fields of an instance. Sets name, labels, priority and `max_duration_s` as requested.

    If another field differs, nothing is changed: 409 `requires_replacement`. If none differs, nothing is
    changed either. An omitted `name` or `project_id` stays as it is.
    """

    def act(session: Session) -> ApplyResult[tables.Instance]:
        return apply_instances.apply(session, access, instance_id, body, if_match)

    def show(session: Session, row: tables.Instance, status: int) -> StoredAnswer:
        return instance_routes.answer_of(context, session, row, status)

    return await applying.answer(context, access, "instance", act, show)


@router.put(
    "/instances/by-name/{name}",
    response_model=None,
    responses={
        **documented(Instance),
        **errors(
            BeingDeleted, GpuReserved, InsufficientCapacity, MemberOfGroup, NameTaken, ProjectRequired,
            RequiresReplacement, *ADMISSION, *SPEC,
        ),
    },
    operation_id="apply_instance",
    tags=["instances"],
)  # fmt: skip
async def apply_instance(
    name: PathName,
    body: InstanceApply,
    request: Request,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the instance of a name. Repeating the same request changes nothing.

    An instance that has ended keeps its name: if nothing differs, it is not run again. See `put_instance` for
    what can be changed.
    """
    require_same_name(name, body.name)
    _count_immediate(request, access, immediate=body.on_capacity == "fail")

    def act(session: Session) -> ApplyResult[tables.Instance]:
        project = _project(context, session, access, body.project_id)
        result = apply_instances.apply_by_name(session, access, project, name, body, if_match)
        if result.outcome is ApplyOutcome.CREATED and body.on_capacity == "fail":
            explain.place_now(session, context.scheduler_cache, [result.row])
        return result

    def show(session: Session, row: tables.Instance, status: int) -> StoredAnswer:
        return instance_routes.answer_of(context, session, row, status)

    return await applying.answer(context, access, "instance", act, show, dry_run=dry_run)


@router.put(
    "/instance-groups/by-name/{name}",
    response_model=None,
    responses={
        **documented(InstanceGroup),
        **errors(
            BeingDeleted, HostNetworkNotAllowed, InsufficientCapacity, NameTaken, ProjectRequired,
            RequiresReplacement, VolumeNotForGroups, *ADMISSION, *SPEC,
        ),
    },
    operation_id="apply_instance_group",
    tags=["instance groups"],
)  # fmt: skip
async def apply_instance_group(
    name: GroupName,
    body: InstanceGroupApply,
    request: Request,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create the instance group of a name, or compare it. Repeating the same request changes nothing.

    No field of a group can be changed: if one differs, the answer is 409 `requires_replacement`. A group that
    has ended keeps its name, and is not run again.
    """
    require_same_name(name, body.name)
    is_immediate = body.template.on_capacity == "fail"
    _count_immediate(request, access, immediate=is_immediate)

    def act(session: Session) -> ApplyResult[tables.InstanceGroup]:
        project = _project(context, session, access, body.project_id)
        result = apply_groups.apply_by_name(session, access, project, name, body, if_match)
        if result.outcome is ApplyOutcome.CREATED and is_immediate:
            members = instance_groups.members(session, result.row)
            explain.place_now(session, context.scheduler_cache, members)
        return result

    def show(session: Session, row: tables.InstanceGroup, status: int) -> StoredAnswer:
        return group_routes.answer_of(context, session, row, status)

    return await applying.answer(context, access, "instance group", act, show, dry_run=dry_run)


@router.put(
    "/reservations/by-name/{name}",
    response_model=None,
    responses={
        **documented(Reservation),
        **errors(BadPeriod, InsufficientCapacity, InvalidTransition, ProjectRequired, RequiresReplacement),
    },
    operation_id="apply_reservation",
    tags=["reservations"],
)
async def apply_reservation(
    name: PathName,
    body: ReservationApply,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the newest reservation of a name. Repeating the same request changes nothing.

    Its period can be changed, not its `gpus`. If it has ended and differs, another one is created.
    """
    require_same_name(name, body.name)

    def act(session: Session) -> ApplyResult[tables.Reservation]:
        project, cache = _project(context, session, access, body.project_id), context.scheduler_cache
        return apply_reservations.apply_by_name(session, access, cache, project, name, body, if_match)

    show = reservation_routes.answer_of
    return await applying.answer(context, access, "reservation", act, show, dry_run=dry_run)


@router.put(
    "/volumes/{volume_id}",
    response_model=Volume,
    responses={
        **DOCUMENTED_CHANGE,
        **errors(NotFound, QuotaExceeded, RequiresReplacement, VolumeSizeFixed),
    },
    operation_id="put_volume",
    tags=["volumes"],
)
async def put_volume(
    volume_id: str, body: VolumeApply, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Apply all fields of a volume. Sets its labels, and its size while no node has it.

    If another field differs, nothing is changed: 409 `requires_replacement`.
    """

    def act(session: Session) -> ApplyResult[tables.Volume]:
        return apply_volumes.apply(session, access, volume_id, body, if_match)

    return await applying.answer(context, access, "volume", act, volume_routes.answer_of)


@router.put(
    "/volumes/by-name/{name}",
    response_model=None,
    responses={
        **documented(Volume),
        **errors(
            NameTaken, NfsNotAllowed, NodeSelectorConflict, NotFound, ProjectRequired, QuotaExceeded,
            RequiresReplacement, TooManyRows, VolumeSizeFixed,
        ),
    },
    operation_id="apply_volume",
    tags=["volumes"],
)  # fmt: skip
async def apply_volume(
    name: PathName,
    body: VolumeApply,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the volume of a name. Repeating the same request changes nothing.

    See `put_volume` for what can be changed.
    """
    require_same_name(name, body.name)

    def act(session: Session) -> ApplyResult[tables.Volume]:
        project = _project(context, session, access, body.project_id)
        return apply_volumes.apply_by_name(session, access, project, name, body, if_match)

    return await applying.answer(context, access, "volume", act, volume_routes.answer_of, dry_run=dry_run)


@router.put(
    "/projects/by-name/{name}",
    response_model=None,
    responses={**documented(Project), **errors(NameTaken, TooManyRows)},
    operation_id="apply_project",
    tags=["projects"],
)
async def apply_project(
    name: PathName,
    body: ProjectApply,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the project of a name. Sets its quotas and other limits; with `members`, also these.

    Owners may change labels and members, admins everything. Repeating the same request changes nothing.
    """
    require_same_name(name, body.name)

    def act(session: Session) -> ApplyResult[tables.Project]:
        return apply_projects.apply_by_name(session, access, name, body, if_match)

    show = project_routes.answer_of
    return await applying.answer(context, access, "project", act, show, dry_run=dry_run)


@router.put(
    "/webhooks/by-name/{name}",
    response_model=None,
    responses={
        **documented(Webhook),
        **errors(MailOff, NameTaken, ProjectRequired, TooManyRows, WebhookUrlNotAllowed),
    },
    operation_id="apply_webhook",
    tags=["webhooks"],
)
async def apply_webhook(
    name: PathName,
    body: WebhookApply,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the webhook of a name. Repeating the same request changes nothing.

    The answer has no secret; `rotate_webhook_secret` shows a new one.
    """
    require_same_name(name, body.name)

    def act(session: Session) -> ApplyResult[tables.Webhook]:
        project = webhooks.project_of(session, access, body, context.identity.default_project_id)
        encryptor, targets = context.encryptor, context.webhook_targets
        return apply_webhooks.apply_by_name(
            session, access, encryptor, targets, project, name, body, if_match
        )

    return await applying.answer(context, access, "webhook", act, webhook_routes.answer_of, dry_run=dry_run)


def _project(context: Context, session: Session, access: Access, project_id: str | None) -> tables.Project:
    return projects.for_new(session, access, project_id, context.identity.default_project_id)


def _count_immediate(request: Request, access: Access, *, immediate: bool) -> None:
    if immediate:
        count_request(request, access.caller, ActionClass.WRITE, IMMEDIATE_EXTRA)
