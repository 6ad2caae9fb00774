"""Authentication and authorization of every request, before its body is read.

`AuthorizedRoute` authenticates the caller and checks that they may call the operation in some project. The
operation itself checks access to its resource, with the `Access` created here.
"""

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Security
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooring.api.auth.rules import RULES, Rule, Who
from mooring.api.context import Context
from mooring.auth.credentials import LiveAccess, NodeCaller
from mooring.auth.rate_limits import ActionClass, network_of
from mooring.core.access import Access, Caller, Permission, lacking
from mooring_client.errors import Forbidden, TooManyQuestions, TooManyRequests, Unauthorized

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

# Requests of these classes may stay open for hours.
_LONG_RUNNING = frozenset({ActionClass.STREAM, ActionClass.EXEC})

# These 429s are delayed. The rate limits keep other 429s rare.
_DELAYED = (TooManyRequests, TooManyQuestions)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AuthorizedRoute(APIRoute):
    """A route that admits only the callers that its row of `api/auth/rules.py` allows."""

    def get_route_handler(self) -> Handler:
        authorized_handler, rule = self.authorized_handler(), rule_of(self)

        async def handle(request: Request) -> Response:
            try:
                await _authorize(request, rule)
                return await authorized_handler(request)
            except (Unauthorized, Forbidden) as error:
                _record_rejection(request, self.operation_id or self.name, error)
                raise
            except TooManyRequests as error:
                if type(error) in _DELAYED:
                    await _delay(request)
                raise

        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Around the whole answer: a stream slot is released even if the client never reads it.
        with ExitStack() as slots:
            scope["state"]["slots"] = slots
            await super().handle(scope, receive, send)

    def authorized_handler(self) -> Handler:
        """The handler that runs after authorization."""
        return super().get_route_handler()


class FrequentRoute(AuthorizedRoute):
    """A route of calls that every node makes all the time. Its endpoint is called with the request alone.

    `api/frequent_calls.py` answers it without FastAPI, which only documents it.
    """

    def authorized_handler(self) -> Handler:
        endpoint: Handler = self.endpoint
        return endpoint


def rule_of(route: APIRoute) -> Rule:
    """Raises LookupError, when the program starts, for a route without a row."""
    name = route.operation_id or route.name
    if name not in RULES:
        raise LookupError(f"{name} has no row in api/auth/rules.py: add who may call it")
    return RULES[name]


def require_all_authorized(app: FastAPI) -> None:
    """Raises LookupError for a route that is not an AuthorizedRoute, except FastAPI's own OpenAPI route."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, AuthorizedRoute) and getattr(route, "path", None) != app.openapi_url:
            raise LookupError(f"{route} is not an AuthorizedRoute: set route_class=AuthorizedRoute")


async def _authorize(request: Request, rule: Rule) -> None:
    if rule.who is Who.PUBLIC:
        return
    context: Context = request.app.state.context
    if rule.permission is Permission.METRICS and context.settings.metrics_public:
        request.state.access = Access(_ANYBODY, rule.permission)
        return
    secret, address = _bearer(request), request.client.host if request.client else None
    if rule.who is Who.NODE:
        request.state.node = await context.credentials.node(secret, address)
        return
    caller = await context.credentials.caller(secret, address)
    request.state.caller = caller
    count_request(request, caller, rule.action_class, rule.cost)
    if rule.permission is not None and not caller.may_somewhere(rule.permission):
        raise lacking(rule.permission)
    needed = rule.permission or Permission.READ
    access = Access(caller, needed, rule.action, address, request.state.request_id)
    request.state.access = access
    if rule.action_class in _LONG_RUNNING:
        request.state.live = open_stream(request, access)


def open_stream(request: Request, access: Access) -> LiveAccess:
    """Take a slot for a request that stays open, until it has been answered.

    Raises:
        TooManyStreams: the caller, their project or the server has too many such requests.
    """
    context: Context = request.app.state.context
    slots: ExitStack = request.state.slots
    slots.enter_context(context.open_streams.opened(access.caller))
    return LiveAccess(access, context.credentials, _bearer(request))


async def _delay(request: Request) -> None:
    caller: Caller | None = getattr(request.state, "caller", None)
    address = request.client.host if request.client else None
    key = network_of(address) if caller is None else caller.project_id or caller.id
    await request.app.state.context.delayed_answers.wait(key)


def count_request(request: Request, caller: Caller, action_class: ActionClass, cost: int) -> None:
    """Count a request, or a cost that its rule does not include, in the rate limits of its caller.

    Raises:
        TooManyRequests: the caller's limit is reached.
    """
    context: Context = request.app.state.context
    request.state.rate_headers, error = context.rates.take(caller, action_class, cost)
    if error is not None:
        raise error


def _record_rejection(request: Request, operation: str, error: Unauthorized | Forbidden) -> None:
    """Count the rejection for the audit log, except subclasses of Forbidden, such as an exceeded quota."""
    rejected = request.app.state.context.rejected_requests
    caller: Caller | None = getattr(request.state, "caller", None)
    if isinstance(error, Unauthorized) or caller is None:
        rejected.unauthorized(request.client.host if request.client else None)
    elif type(error) is Forbidden:
        rejected.forbidden(caller, operation)


def _bearer(request: Request) -> str:
    """Raises Unauthorized when the request carries no bearer credentials."""
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise Unauthorized("send your API key: -H 'Authorization: Bearer <key>'")
    return secret.strip()


async def _access(
    request: Request, _documented: Annotated[HTTPAuthorizationCredentials | None, Security(_user_scheme)]
) -> Access:
    access: Access = request.state.access
    return access


async def _live(request: Request, _access: Annotated[Access, Depends(_access)]) -> LiveAccess:
    live: LiveAccess = request.state.live
    return live


async def _node(
    request: Request, _documented: Annotated[HTTPAuthorizationCredentials | None, Security(_node_scheme)]
) -> NodeCaller:
    node: NodeCaller = request.state.node
    return node


# The security schemes only document the credentials in OpenAPI; `AuthorizedRoute` has checked them already.
CurrentAccess = Annotated[Access, Depends(_access)]
CurrentLiveAccess = Annotated[LiveAccess, Depends(_live)]  # for operations that may stay open for hours
CurrentNode = Annotated[NodeCaller, Depends(_node)]
DOCUMENTED_NODE = Security(_node_scheme)  # for a FrequentRoute
