"""Waiting for an instance to get somewhere, for as long as the client does, without holding a session."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from mooring.api.auth.credentials import RENEWED_S, LiveAccess
from mooring.api.context import Context
from mooring.api.views import instances as instance_views
from mooring.control.instances import instances
from mooring.core.access import Access
from mooring.core.instance.state import ENDED, DesiredState, State
from mooring.db.signals import Topic, Waiter
from mooring.schemas.base import Json

Heard = TypeVar("Heard")

# Another replica's change comes as a notification; should one be lost, this is how late it is seen. A
# thousand that wait, each with a look every second or two, would cost as much as all other requests.
LOOK_AGAIN_S = 10.0

# Passing through counts: whoever waits for `starting` is not left waiting because it was quick.
_ORDER = [State.PENDING, State.SCHEDULED, State.STARTING, State.RUNNING]


def reached(state: State, target: State) -> bool:
    """Whether an instance in this state is where it was waited for."""
    if target in _ORDER[1:3] and state in _ORDER:
        return _ORDER.index(state) >= _ORDER.index(target)
    return state is target


def out_of_reach(state: State, desired: DesiredState, target: State) -> bool:
    """Whether only another verb of a user could still bring it there; a delete can always follow."""
    if reached(state, target) or state is State.DELETED:
        return not reached(state, target)
    if target is State.DELETED:
        return False
    if state in ENDED or target is State.PENDING:
        return True
    if target in _ORDER:
        return desired is not DesiredState.RUNNING
    return desired is DesiredState.DELETED and target is not State.STOPPING


async def while_heard(request: Request, waiting: Awaitable[Heard]) -> Heard:
    """Wait for it as long as the client does.

    Raises:
        ClientDisconnect: the client is gone; a poll that nobody hears would keep its place for a minute.
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
    """Wait to be woken, for LOOK_AGAIN_S or `within_s` at most, or until the caller sees other projects.

    Returns:
        The access as it is now; it is asked for every RENEWED_S.

    Raises:
        Unauthorized, Forbidden: the caller lost their access meanwhile.
    """
    until = time.monotonic() + min(within_s, LOOK_AGAIN_S)
    while True:
        left = until - time.monotonic()
        woken = await waiter.wait(max(0.0, min(left, RENEWED_S)))
        renewed = await live.renewed()
        if woken or left <= RENEWED_S or renewed.projects != access.projects:
            return renewed


async def wait(context: Context, live: LiveAccess, instance_id: str, target: State, timeout_s: float) -> Json:
    """`{"reached", "instance"}` as soon as it is decided, or at the timeout.

    Raises:
        NotFound, Forbidden: as `instances.get`, also when the access is lost meanwhile.
        Unauthorized: the credentials were taken back meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    access = live.access
    known = False
    with context.database.signals.subscribed(Topic.instance(instance_id)) as waiter:
        while True:
            shown = await run_in_threadpool(_read, context, access, instance_id, known)
            known = True
            state, desired = State(shown["state"]), DesiredState(shown["desired_state"])
            left = deadline - time.monotonic()
            if reached(state, target):
                return {"reached": True, "instance": shown}
            if left <= 0 or context.database.signals.closing or out_of_reach(state, desired, target):
                return {"reached": False, "instance": shown}
            access = await until_woken(live, access, waiter, left)


def _read(context: Context, access: Access, instance_id: str, known: bool) -> Json:
    with context.database.read() as session:
        # Once it was seen, its deletion is an answer and not a 404.
        row = instances.get(session, access, instance_id, even_deleted=known)
        return instance_views.instance(session, row, context.scheduler_cache.positions)
