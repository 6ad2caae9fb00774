"""Strict parsing of request bodies.

NaN, numbers beyond a double, lone surrogates, NUL characters, nesting past 200 levels and invalid UTF-8 are
answered 400 or 422 here; Python's own JSON parser accepts them, and they would fail later in the database.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import AuthorizedRoute, Handler, rule_of
from mooring.api.context import Context
from mooring.auth.rate_limits import ActionClass
from mooring.core.access import Caller
from mooring_client.errors import BadJson, TooLarge, UnsupportedMediaType

# The largest valid instance has about 2,500 values. Each invalid value produces an error of its own.
MAX_VALUES = 4000


class StrictRequest(Request):
    """A request whose JSON is parsed by pydantic's strict parser."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            parsed = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise BadJson(f"the body is not valid JSON: {_without_control(str(error))}") from None
        # Each value but the first follows one of these characters, so most bodies need no exact count.
        if sum(map(body.count, (b",", b"[", b"{"))) >= MAX_VALUES:
            _require_max_values(parsed)
        return parsed

    async def body(self) -> bytes:
        body = await super().body()
        if b"\x00" in body:
            raise BadJson("the body contains a NUL byte")
        return body


def _require_max_values(parsed: Any) -> None:
    """Raises TooLarge if there are more than MAX_VALUES members and items, at all depths together."""
    count, left = 0, [parsed]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            count += len(value)
            left += value.values() if isinstance(value, dict) else value
        if count > MAX_VALUES:
            raise TooLarge(f"a request body may have {MAX_VALUES} values at most")


def require_json_type(request: Request) -> None:
    """Raises UnsupportedMediaType if the Content-Type is not JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(
            f"send JSON with the header Content-Type: application/json (got {kind or 'none'!r})"
        )


def _without_control(message: str) -> str:
    return json.dumps(message, ensure_ascii=True)[1:-1]


class StrictRoute(AuthorizedRoute):
    """An authorized route with strict parsing, and with a limit on each project's concurrent writes."""

    def authorized_handler(self) -> Handler:
        inner, rule = super().authorized_handler(), rule_of(self)
        takes_turn = rule.action_class is ActionClass.WRITE and not rule.own_turns

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if self.body_field is not None and await strict.body():
                require_json_type(strict)
            if not takes_turn:
                return await inner(strict)
            # Wait for a turn only when the body is complete: a client may send it slowly.
            async with write_turn(request.app.state.context, request.state.caller):
                return await inner(strict)

        return handle


@asynccontextmanager
async def write_turn(context: Context, caller: Caller) -> AsyncIterator[None]:
    """Wait for a turn among the writes of the caller's project, or of this admin."""
    turns = context.admin_write_turns if caller.is_admin else context.write_turns
    async with turns.taken(caller):
        yield
