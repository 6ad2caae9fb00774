"""The members of uvicorn that `StreamProtocol` uses: an upgrade that drops or renames one fails here."""

import inspect
import textwrap

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mooring.streams.websockets import StreamProtocol

ATTRIBUTES = {
    "close_sent", "conn", "handshake_complete", "loop", "ping_timer", "read_paused", "transport", "writable",
}  # fmt: skip
METHODS = {
    "connection_lost", "data_received", "handle_connect", "handle_pong", "send", "shutdown",
    "start_keepalive",
}  # fmt: skip


def test_uvicorn_has_the_members_that_mooring_uses() -> None:
    constructor = textwrap.dedent(inspect.getsource(WebSocketsSansIOProtocol.__init__))
    assert {name for name in ATTRIBUTES if f"self.{name}" in constructor} == ATTRIBUTES
    assert vars(WebSocketsSansIOProtocol).keys() >= METHODS
    connect = inspect.getsource(WebSocketsSansIOProtocol.handle_connect)
    assert "self.scope" in connect
    assert "self.response" in connect
    # Where the keepalive begins, and how a rejection ends.
    send = inspect.getsource(WebSocketsSansIOProtocol.send)
    assert "self.start_keepalive()" in send
    assert "websocket.http.response.body" in send


def test_the_lists_above_name_every_method_that_mooring_overrides() -> None:
    ours = {name for name in vars(StreamProtocol) if name in vars(WebSocketsSansIOProtocol)}
    assert ours - set(dir(type)) == METHODS
