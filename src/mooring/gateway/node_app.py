"""What nodes, SSH clients behind a firewall and load balancers call over HTTP."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from mooring.auth.credentials import Credentials
from mooring.db import failures
from mooring.db.session import Database
from mooring.streams.node_streams import StreamOpener
from mooring_client.errors import MooringError, NotFound, Unauthorized

ServeSsh = Callable[[WebSocket], Awaitable[None]]


def create_node_app(
    database: Database, credentials: Credentials, opener: StreamOpener, serve_ssh: ServeSsh
) -> Starlette:
    app = Starlette(
        routes=[
            WebSocketRoute("/agent/v1/streams/{stream_id}", _bring_stream),
            WebSocketRoute("/v1/ssh", serve_ssh),
            Route("/healthz", _healthz),
            Route("/readyz", _readyz),
        ]
    )
    app.state.database, app.state.credentials, app.state.opener = database, credentials, opener
    return app


async def _bring_stream(socket: WebSocket) -> None:
    """A node connects for a stream that a client of this process waits for."""
    state = socket.app.state
    opener: StreamOpener = state.opener
    credentials: Credentials = state.credentials
    stream_id: str = socket.path_params["stream_id"]
    try:
        node = await credentials.node(_bearer(socket), socket.client.host if socket.client else None)
        channel = opener.channels.find(stream_id, node.id)
        if channel is None or channel.is_connected:
            raise NotFound(f"no client waits for stream {stream_id} here")
        await opener.connected(stream_id)
    except MooringError as error:
        await socket.send_denial_response(PlainTextResponse(error.message, error.status))
        return
    await channel.serve(socket)


def _bearer(socket: WebSocket) -> str:
    """Raises Unauthorized: there is no bearer credential."""
    kind, _, secret = socket.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise Unauthorized("send the node's credential")
    return secret.strip()


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> Response:
    database: Database = request.app.state.database
    try:
        await run_in_threadpool(_ask, database)
    except failures.DATABASE_ERRORS as error:
        return PlainTextResponse(f"the database does not answer: {error}\n", 503)
    return PlainTextResponse("ok\n")


def _ask(database: Database) -> None:
    with database.read() as session:
        session.connection().exec_driver_sql("SELECT 1")
