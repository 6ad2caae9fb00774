"""The members of uvicorn that Mooring's servers use: an upgrade that drops or renames one fails here."""

import ast
import inspect
import textwrap
from types import ModuleType

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

import mooring.server
from mooring.streams import http_protocol
from mooring.streams.http_protocol import HttpProtocol

PROTOCOL = {"connections", "cycle", "flow", "loop", "pipeline", "scope", "transport", "url"}
CYCLE = {"disconnected", "message_event", "response_complete", "response_started"}
FLOW = {"read_paused"}
CALLBACKS = {
    "connection_made", "connection_lost", "data_received", "on_message_begin", "on_headers_complete",
    "on_body", "on_message_complete", "on_response_complete", "send_400_response",
    "handle_websocket_upgrade", "_should_upgrade",
}  # fmt: skip
SERVER = {"_captured_signals", "config", "servers", "started"}
SERVER_METHODS = {"capture_signals", "shutdown", "startup"}


def _constructed(owner: type) -> set[str]:
    """The attributes that the constructor of a class assigns."""
    source = textwrap.dedent(inspect.getsource(owner.__init__))  # type: ignore[misc]
    return _attributes(source, "self", ast.Store)


def _attributes(source: str, owner: str, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The attributes of `owner` in `source`; `owner` is a variable or an attribute."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, context) and ast.unparse(node.value).rpartition(".")[2] == owner
    }


def _used(module: ModuleType, owner: str, cls: type | None = None) -> set[str]:
    """The attributes of `owner` that a module, or a class of it, reads or assigns."""
    return _attributes(inspect.getsource(cls or module), owner)


def test_uvicorn_has_the_members_that_mooring_uses() -> None:
    # `url` is assigned at the beginning of each request.
    assert "self.url" in inspect.getsource(HttpToolsProtocol.on_message_begin)
    assert _constructed(HttpToolsProtocol) | {"url"} >= PROTOCOL
    assert _constructed(RequestResponseCycle) >= CYCLE
    assert _constructed(FlowControl) >= FLOW
    assert vars(HttpToolsProtocol).keys() >= CALLBACKS
    assert _constructed(uvicorn.Server) | {"servers"} >= SERVER
    assert vars(uvicorn.Server).keys() >= SERVER_METHODS
    assert "self.servers" in inspect.getsource(uvicorn.Server.startup)


def test_the_lists_above_name_every_member_that_mooring_uses() -> None:
    ours = vars(HttpProtocol).keys() | _constructed(HttpProtocol)
    assert _used(http_protocol, "self", HttpProtocol) - ours == PROTOCOL
    assert _used(http_protocol, "cycle") == CYCLE
    assert _used(http_protocol, "flow") == FLOW
    assert {name for name in vars(HttpProtocol) if name in vars(HttpToolsProtocol)} - set(
        dir(type)
    ) == CALLBACKS
    serving = mooring.server._Server
    assert _used(mooring.server, "self", serving) - _constructed(serving) == SERVER
    assert {name for name in vars(serving) if not name.startswith("_")} == SERVER_METHODS
