"""`/compat/prime`: the part of Prime Intellect's API that SkyPilot calls, for SkyPilot as it is.

Prime defines these operations, so they are not in the OpenAPI document, and the SDK has none of them. For all
else they are operations as others: with rules in `api/auth/rules.py`, quotas, rate limits and audit rows.
"""

from functools import partial
from typing import Final

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess, Handler, count_request
from mooring.api.auth.rules import IMMEDIATE_EXTRA
from mooring.api.compat import prime_pods
from mooring.api.compat.prime_pods import PrimePodCreate, PrimeSshKey
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute, write_turn
from mooring.api.http.transactions import Call, CurrentCall
from mooring.auth.rate_limits import ActionClass
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import instances
from mooring.control.nodes import instance_types
from mooring.control.scheduling import explain
from mooring.control.tenants import projects, ssh_keys
from mooring.db import tables
from mooring_client.errors import (
    Forbidden,
    InsufficientCapacity,
    QuotaExceeded,
    SkypilotOff,
    SshOff,
    Unauthorized,
)
from mooring_client.schemas.base import Json

# Of a list, which is one page: far more than SkyPilot is used with.
MOST_PODS: Final = 1000


class PrimeRoute(StrictRoute):
    """A route whose errors SkyPilot understands.

    It takes only 403 for a wrong key, and some words in `detail` for "try elsewhere".
    """

    def get_route_handler(self) -> Handler:
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except Unauthorized as error:
                raise Forbidden(error.message) from None
            except InsufficientCapacity as error:
                raise InsufficientCapacity(_refused(error), **error.fields) from None
            except QuotaExceeded as error:
                raise QuotaExceeded(f"quota exceeded: {error.message}", **error.fields) from None

        return handle


def _refused(error: InsufficientCapacity) -> str:
    """The message with some refusals, as SkyPilot shows no other field. `on_capacity` cannot be set here."""
    message, refusals = error.message.partition("; omit on_capacity")[0], error.fields.get("refusals", ())
    shown = [
        f"{each['node_name']} {each['code']}: wanted {each['wanted']}, had {each['had']}"
        for each in refusals[:3]
    ]
    more = f" (and {len(refusals) - 3} more)" if len(refusals) > 3 else ""
    return "; ".join([f"insufficient capacity: {message}", *shown]) + more


router = APIRouter(prefix="/compat/prime/api/v1", route_class=PrimeRoute, include_in_schema=False)


@router.get("/ssh_keys", operation_id="list_prime_ssh_keys")
def list_prime_ssh_keys(context: Ctx, access: CurrentAccess) -> Response:
    """List the SSH keys with which the caller can log in to all pods that it can create."""
    with context.database.read() as session:
        data = [_ssh_key(row) for row in ssh_keys.usable(session, access)]
    return responses.respond(responses.json_answer({"data": data}))


@router.post("/ssh_keys", operation_id="create_prime_ssh_key")
def create_prime_ssh_key(body: PrimeSshKey, context: Ctx, call: CurrentCall) -> Response:
    """Register an SSH key, as `create_ssh_key`."""

    def act(session: Session) -> StoredAnswer:
        row = ssh_keys.create(session, call.access, body.name, body.public_key, None, None)
        return responses.json_answer(_ssh_key(row), 201)

    return transactions.idempotent(context, call, act)


def _ssh_key(row: tables.SshKey) -> Json:
    return {"id": row.id, "name": row.name, "publicKey": row.public_key}


@router.get("/pods", operation_id="list_prime_pods")
def list_prime_pods(context: Ctx, access: CurrentAccess) -> Response:
    """List the newest pods. SkyPilot takes the first page for all of them, so there is only one."""
    instance = tables.Instance
    query = select(instance).where(instance.deleted_at.is_(None), prime_pods.is_pod())
    query = pagination.visible(query, instance.project_id, access).order_by(instance.id.desc())
    query = query.limit(MOST_PODS)
    with context.database.read() as session:
        data = [prime_pods.shown(row, context.settings) for row in session.scalars(query)]
    content = {"total_count": len(data), "offset": 0, "limit": len(data), "data": data}
    return responses.respond(responses.json_answer(content))


@router.post("/pods", operation_id="create_prime_pod")
async def create_prime_pod(
    request: Request, body: PrimePodCreate, context: Ctx, call: CurrentCall
) -> Response:
    """Create a pod: an instance that is placed at once or rejected, and waits for SkyPilot to log in."""
    count_request(request, call.access.caller, ActionClass.WRITE, IMMEDIATE_EXTRA)
    async with write_turn(context, call.access.caller):
        return await run_in_threadpool(_create, context, call, body)


def _create(context: Context, call: Call, body: PrimePodCreate) -> Response:
    settings, default_project = context.settings, context.identity.default_project_id
    image = settings.skypilot_image
    if image is None:
        raise SkypilotOff("this service creates no pods: set MOORING_SKYPILOT_IMAGE, an image for SkyPilot")
    if settings.ssh_address is None:
        raise SshOff("this service has no SSH gateway: set MOORING_SSH_PORT and run mooring gateway")

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, default_project)
        shapes = instance_types.derive(session, context.scheduler_cache, call.access)
        nodes = context.scheduler_cache.nodes(session)
        wanted = prime_pods.request_of(body.pod, image, shapes, nodes)
        wanted = prime_pods.named(session, project.id, wanted)
        row = instances.create(session, call.access, project, wanted)
        explain.place_now(session, context.scheduler_cache, [row])
        return responses.json_answer(prime_pods.shown(row, settings))

    return transactions.idempotent(context, call, act)


@router.get("/pods/{pod_id}", operation_id="get_prime_pod")
def get_prime_pod(pod_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a pod."""
    with context.database.read() as session:
        content = prime_pods.shown(prime_pods.get(session, access, pod_id), context.settings)
    return responses.respond(responses.json_answer(content))


@router.delete("/pods/{pod_id}", operation_id="delete_prime_pod")
async def delete_prime_pod(pod_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Delete a pod. SkyPilot expects a body."""
    act = partial(_delete, context, access, pod_id)
    return await transactions.batched_delete(context, access, pod_id, act)


def _delete(context: Context, access: CurrentAccess, pod_id: str, session: Session) -> StoredAnswer:
    with session.no_autoflush:  # write all rows of a batch in one flush
        prime_pods.get(session, access, pod_id)
        row = instances.delete(session, access, pod_id, None)
        return responses.json_answer(prime_pods.shown(row, context.settings))
