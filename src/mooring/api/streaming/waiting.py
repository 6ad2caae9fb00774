"""Waits for an instance to reach a state while the client is connected, without a database session."""

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from mooring.api.context import Context
from mooring.api.views import instances as instance_views
from mooring.auth.credentials import LiveAccess
from mooring.control.instances import instances
from mooring.core.access import RENEWED_S, Access
from mooring.core.instance.state import ENDED
from mooring.db.signals import Topic, Waiter
from mooring_client.schemas.base import Json
from mooring_client.schemas.states import DesiredState, State

Result = TypeVar("Result")

# Notifications report changes, also of other replicas; polling covers a lost notification. For a thousand
# clients, polling every second or two would cost as much as all other requests.
POLL_INTERVAL_S = 10.0

_ORDER = [State.PENDING, State.SCHEDULED, State.STARTING, State.RUNNING]
# These may be too short to be seen, so they count as reached once the instance has passed them.
_SHORT = frozenset({State.SCHEDULED, State.STARTING})


def reached(state: State, target: State) -> bool:
    """Whether an instance in this state has reached the target."""
    if target in _SHORT and state in _ORDER:
        return _ORDER.index(state) >= _ORDER.index(target)
    return state is target


def out_of_reach(state: State, desired: DesiredState, target: State) -> bool:
    """Whether the instance cannot reach the target without another operation of a user.

    `deleted` is never out of reach.
    """
    if reached(state, target) or target is State.DELETED:
        return False
    if state in ENDED or state is State.DELETED or target is State.PENDING:
        return True
    if target in _ORDER:
        return desired is not DesiredState.RUNNING
    return desired is DesiredState.DELETED and target is not State.STOPPING


async def while_connected(request: Request, waiting: Awaitable[Result]) -> Result:
    """Wait for a result while the client is connected.

    Raises:
        ClientDisconnect: the client is gone; its poll must not occupy a stream slot for another minute.
    """
    waited, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({waited, gone}, return_when=asyncio.FIRST_COMPLETED)
        if waited.done():
            return waited.result()
        raise ClientDisconnect
    finally:
        waited.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def until_woken(live: LiveAccess, access: Access, waiter: Waiter, within_s: float) -> Access:
    """Wait for a notification or a change of the caller's projects, POLL_INTERVAL_S or `within_s` at most.

    Returns:
        The current access; it is renewed every RENEWED_S meanwhile.

    Raises:
        Unauthorized, Forbidden: the caller lost access meanwhile.
    """
    until = time.monotonic() + min(within_s, POLL_INTERVAL_S)
    while True:
        left = until - time.monotonic()
        woken = await waiter.wait(max(0.0, min(left, RENEWED_S)))
        renewed = await live.renewed()
        if woken or left <= RENEWED_S or renewed.projects != access.projects:
            return renewed


async def wait(context: Context, live: LiveAccess, instance_id: str, target: State, timeout_s: float) -> Json:
    """Return `{"reached", "instance"}` once the target is reached or out of reach, or at the timeout.

    Raises:
        NotFound, Forbidden: as `instances.get`, also if the access is lost meanwhile.
        Unauthorized: the credential was revoked meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    access = live.access
    was_found = False
    with context.database.signals.subscribed(Topic.instance(instance_id)) as waiter:
        while True:
            left = deadline - time.monotonic()
            is_last = left <= 0 or context.database.signals.closing
            read = partial(_read, context, access, instance_id, was_found=was_found)
            if (result := await run_in_threadpool(read, target, is_last=is_last)) is not None:
                return result
            was_found = True
            access = await until_woken(live, access, waiter, left)


def _read(
    context: Context, access: Access, instance_id: str, target: State, *, was_found: bool, is_last: bool
) -> Json | None:
    """The result of the wait; None: it goes on. Then the instance is not rendered."""
    with context.database.read() as session:
        # Once the instance was found, its deletion is an answer and not a 404.
        row = instances.get(session, access, instance_id, even_deleted=was_found)
        is_reached = reached(row.state, target)
        if not (is_reached or is_last or out_of_reach(row.state, row.desired_state, target)):
            return None
        positions = context.scheduler_cache.positions
        shown = instance_views.instance(session, row, positions, context.port_urls)
        return {"reached": is_reached, "instance": shown}
