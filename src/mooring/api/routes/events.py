"""`/v1/events`: every change in order, as a page, a long poll or a stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mooring.api.auth.authorization import CurrentLiveAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import responses
from mooring.api.http.body import StrictRoute
from mooring.api.http.problems import database_unavailable
from mooring.api.openapi.responses import errors
from mooring.api.streaming import sse, waiting
from mooring.api.streaming.event_pages import PageEvent
from mooring.auth.credentials import LiveAccess
from mooring.control import events
from mooring.db import failures
from mooring_client.errors import BadEventId, Gone, MooringError
from mooring_client.schemas.events import EventList

router = APIRouter(prefix="/v1", tags=["events"], route_class=StrictRoute)

_SEQ_LIMIT = 2**63
_BATCH = 200
# The pause between two batches for one follower. All streams and long polls of a project together get at most
# 100 batches a second: a batch costs about 0.3 ms of CPU on a stream, and 3 ms on a long poll.
_LEAST_PAUSE_S = 0.05
_PAUSE_PER_FOLLOWER_S = 0.01
# About the time from the insert of an event to its commit.
_HELD_BACK_S = 0.02


@router.get(
    "/events",
    response_model=EventList,
    responses={200: {"content": {sse.MEDIA_TYPE: {"schema": {"type": "string"}}}}, **errors(Gone)},
    operation_id="list_events",
)
async def list_events(
    request: Request,
    context: Ctx,
    live: CurrentLiveAccess,
    after: Annotated[int, Query(ge=0, lt=_SEQ_LIMIT, description="last `seq` that you have")] = 0,
    newest: Annotated[bool, Query(description="start after the newest event, not after `after`")] = False,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    wait_s: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="seconds to wait")] = 0,
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
    last_event_id: Annotated[
        str | None,
        Header(
            max_length=32,
            description="the `id:` of the last event that you have; overrides `after`",
            json_schema_extra={"pattern": "^[0-9]{1,18}$"},
        ),
    ] = None,
) -> Response:
    """List events. Returns events after a `seq`, oldest first; `Accept: text/event-stream` streams them."""
    if newest and last_event_id is None:
        after = await context.event_pages.newest(context.database, live.access)
    after = _resumed(last_event_id, after)
    if sse.wanted(accept):
        # An expired `after` must be answered 410, before the stream starts.
        await context.event_pages.page(context.database, live.access, after, 1)
        return StreamingResponse(
            _follow(context, live, after), media_type=sse.MEDIA_TYPE, headers=sse.HEADERS
        )
    waited = _wait_for_some(context, live, after, limit, wait_s, _pause_s(context, live))
    items = [each.item for each in await waiting.while_connected(request, waited)]
    last = items[-1]["seq"] if items else after
    return responses.respond(responses.json_answer({"items": items, "next_cursor": None, "last_seq": last}))


def _resumed(last_event_id: str | None, after: int) -> int:
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit()) or int(last_event_id) >= _SEQ_LIMIT:
        raise BadEventId("Last-Event-ID must be the id of an event, a whole number")
    return int(last_event_id)


async def _wait_for_some(
    context: Context,
    live: LiveAccess,
    after: int,
    limit: int,
    wait_s: float,
    pause_s: float = 0.0,
    *,
    follows: bool = False,
) -> list[PageEvent]:
    """Wait for the next events. Returns none if there are none after `wait_s`.

    Args:
        pause_s: how long to wait before each later read, so that it finds several events.
        follows: whether the caller has read a page before.

    Raises:
        Unauthorized, Forbidden: the caller lost their access meanwhile.
    """
    deadline = time.monotonic() + wait_s
    access, signals = live.access, context.database.signals
    current, subscribed_at = access, None
    while True:
        with signals.subscribed(*events.topics(access.projects)) as waiter:
            if follows:
                subscribed_at = time.monotonic()
                await asyncio.sleep(min(deadline - subscribed_at, pause_s))
                # The pause may be longer than revoked access may stay in effect (R29).
                current = await live.renewed()
            page = await context.event_pages.page(context.database, current, after, limit, subscribed_at)
            left = deadline - time.monotonic()
            if page.found or left <= 0 or signals.closing:
                return page.found
            if page.held_back:
                left = min(left, _HELD_BACK_S)
            access = await waiting.until_woken(live, access, waiter, left)
        follows = True


async def _follow(context: Context, live: LiveAccess, after: int) -> AsyncIterator[bytes]:
    while not context.database.signals.closing:
        try:
            live = replace(live, access=await live.renewed())
            found = await _wait_for_some(context, live, after, _BATCH, sse.KEEPALIVE_S, follows=True)
        except (MooringError, *failures.DATABASE_ERRORS) as failure:
            if not isinstance(failure, MooringError) and not failures.is_unavailable(failure):
                raise
            error = failure if isinstance(failure, MooringError) else database_unavailable(failure)
            yield sse.error(error.code, error.message)
            return
        if not found:
            yield sse.KEEPALIVE
        else:
            yield b"".join(each.frame for each in found)
            after = found[-1].item["seq"]
        # Events of this pause are sent in one batch after it.
        await asyncio.sleep(max(_LEAST_PAUSE_S, _pause_s(context, live)))


def _pause_s(context: Context, live: LiveAccess) -> float:
    return context.open_streams.of_same_project(live.access.caller) * _PAUSE_PER_FOLLOWER_S
