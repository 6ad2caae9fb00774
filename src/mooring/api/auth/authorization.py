"""The gate that every request passes before anything of it is read: who is it, and may they do this at all?

What is left to the verbs is the look at the single thing, for which they are given the `Access` made here.
"""

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Security
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooring.api.auth.credentials import LiveAccess
from mooring.api.auth.rate_limits import network_of
from mooring.api.auth.rules import RULES, ActionClass, Rule, Who
from mooring.api.context import Context
from mooring.core.access import Access, Caller, Permission, lacking
from mooring.core.credentials import hashed
from mooring.core.errors import Forbidden, TooManyRequests, Unauthorized

_user_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="ApiKey",
    description="An API key, or a token of your organisation's sign-on: `Authorization: Bearer mk_…`",
)
_node_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="NodeCredential",
    description="A node's credential: `Authorization: Bearer mn_…`",
)


_ANYBODY = Caller("anybody", "system", "anybody", everywhere=frozenset({Permission.METRICS}))

# These may go on for long.
_LASTING = frozenset({ActionClass.STREAM, ActionClass.EXEC})

# Other refusals of this kind come from limits that few can reach within their rates.
_ANSWERED_LATE = frozenset({"too_many_requests", "too_many_questions"})

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class NodeCaller:
    """The node of a credential seen not long ago; who acts on it compares the hash with the node's own."""

    id: str
    credential_hash: str


class GatedRoute(APIRoute):
    """A route that nobody passes whom its row of `api/auth/rules.py` does not let in."""

    def get_route_handler(self) -> Handler:
        inner, rule, name = self.open_handler(), rule_of(self), self.operation_id or self.name

        async def handle(request: Request) -> Response:
            try:
                await _pass(request, rule)
                return await inner(request)
            except (Unauthorized, Forbidden) as error:
                _count_refusal(request, name, error)
                raise
            except TooManyRequests as error:
                if error.error_code in _ANSWERED_LATE:
                    await _hold_back(request)
                raise

        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Around the whole answer: a stream's place is let go of also if nobody ever began to read it.
        with ExitStack() as places:
            scope["state"]["places"] = places
            await super().handle(scope, receive, send)

    def open_handler(self) -> Handler:
        """The handler behind the gate."""
        return super().get_route_handler()


def rule_of(route: APIRoute) -> Rule:
    """Raises LookupError for a route that the table does not have, at the start of the program."""
    name = route.operation_id or route.name
    if name not in RULES:
        raise LookupError(f"{name} has no row in api/auth/rules.py: say who may call it")
    return RULES[name]


def require_all_authorized(app: FastAPI) -> None:
    """Raises LookupError for a route that was added around the gate; the public document is FastAPI's own."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, GatedRoute) and getattr(route, "path", None) != app.openapi_url:
            raise LookupError(f"{route} is no GatedRoute: give its router route_class=GatedRoute")


async def _pass(request: Request, rule: Rule) -> None:
    if rule.who is Who.PUBLIC:
        return
    context: Context = request.app.state.context
    if rule.permission is Permission.METRICS and context.settings.metrics_public:
        request.state.access = Access(_ANYBODY, rule.permission)
        return
    secret, address = _bearer(request), request.client.host if request.client else None
    if rule.who is Who.NODE:
        request.state.node = NodeCaller(await context.credentials.node(secret, address), hashed(secret))
        return
    caller = await context.credentials.caller(secret, address)
    request.state.caller = caller
    count_request(request, caller, rule.action_class, rule.cost)
    if rule.permission is not None and not caller.may_somewhere(rule.permission):
        raise lacking(rule.permission)
    needed = rule.permission or Permission.READ
    access = Access(caller, needed, rule.action, address, request.state.request_id)
    request.state.access = access
    if rule.action_class in _LASTING:
        places: ExitStack = request.state.places
        places.enter_context(context.open_streams.opened(caller))
        request.state.live = LiveAccess(access, context.credentials, secret)


async def _hold_back(request: Request) -> None:
    caller: Caller | None = getattr(request.state, "caller", None)
    address = request.client.host if request.client else None
    key = network_of(address) if caller is None else caller.project_id or caller.id
    await request.app.state.context.held_back.hold(key)


def count_request(request: Request, caller: Caller, action_class: ActionClass, cost: int) -> None:
    """Count a request, or what it costs beyond its rule, in the rate limits of its caller.

    Raises:
        TooManyRequests: there is no room for it.
    """
    context: Context = request.app.state.context
    request.state.rate_headers, refusal = context.rates.take(caller, action_class, cost)
    if refusal is not None:
        raise refusal


def _count_refusal(request: Request, operation: str, error: Unauthorized | Forbidden) -> None:
    """For the audit log. A quota that is full is no attempt at what one may not do."""
    refusals = request.app.state.context.refusals
    caller: Caller | None = getattr(request.state, "caller", None)
    if isinstance(error, Unauthorized) or caller is None:
        refusals.unauthorized(request.client.host if request.client else None)
    elif error.error_code == Forbidden.code:
        refusals.forbidden(caller, operation)


def _bearer(request: Request) -> str:
    """Raises Unauthorized when the request carries no bearer credentials."""
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise Unauthorized("send your API key: -H 'Authorization: Bearer <key>'")
    return secret.strip()


async def _access(
    request: Request, _shown: Annotated[HTTPAuthorizationCredentials | None, Security(_user_scheme)]
) -> Access:
    access: Access = request.state.access
    return access


async def _live(request: Request, _access: Annotated[Access, Depends(_access)]) -> LiveAccess:
    live: LiveAccess = request.state.live
    return live


async def _node(
    request: Request, _shown: Annotated[HTTPAuthorizationCredentials | None, Security(_node_scheme)]
) -> NodeCaller:
    node: NodeCaller = request.state.node
    return node


# The schemes stand here for the OpenAPI document only; the gate has decided long before.
CurrentAccess = Annotated[Access, Depends(_access)]
CurrentLiveAccess = Annotated[LiveAccess, Depends(_live)]  # of operations that may go on for long
CurrentNode = Annotated[NodeCaller, Depends(_node)]
