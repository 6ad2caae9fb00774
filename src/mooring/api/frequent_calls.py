"""Answers the calls that every node makes all the time (`FrequentRoute`) without FastAPI's layers.

With thousands of nodes, nearly all requests are such calls, and thousands of them wait at any time. The
layers of FastAPI and Starlette around an operation took much of the CPU of such a call, and most of the
memory of one that waits (docs/decisions/0028-heartbeats.md). What protects the server is the same as for
other calls: `Edge`, the error handlers and the authorization.
"""

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mooring.api.auth.authorization import FrequentRoute
from mooring.api.http.edge import Edge


class FrequentCalls:
    """The ASGI application around FastAPI's. Any call that is not frequent goes to `app`."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        routes = (context.original_route for context in iter_route_contexts(app.routes))
        self._handlers = {
            (method, route.path): route.get_route_handler()
            for route in routes
            if isinstance(route, FrequentRoute)
            for method in route.methods or ()
        }
        self._protected = Edge(ExceptionMiddleware(self._answer, app.exception_handlers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) in self._handlers:
            scope["app"] = self._app
            await self._protected(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handlers[scope["method"], scope["path"]](Request(scope, receive, send))
        await response(scope, receive, send)
