"""The gateway keeps a bounded amount of data for an SSH client, and takes a bounded amount from it."""

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import asyncssh
import asyncssh.channel
import asyncssh.connection
import pytest
import uvloop

from mooring.gateway.ssh.connections import ProvenOnce
from mooring.gateway.ssh.copying import JoinedPieces
from mooring.gateway.ssh.pacing import PacedConnection, pace_of

MIB = 1024 * 1024
ANSWER_BYTES = 65536
WITHIN_S = 30


class Talkative:
    """In place of asyncssh: answers each piece of data with 64 KiB."""

    def __init__(self) -> None:
        self.answered = 0
        self.aborted = asyncio.Event()
        self.lost = asyncio.Event()
        self._inpbuf = b""
        self._deferred_packets: list[bytes] = []
        self._info: dict[str, Any] = {}

    def set_extra_info(self, **info: Any) -> None:
        self._info |= info

    def get_extra_info(self, name: str) -> Any:
        return self._info[name]

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        self.answered += 1
        self._transport.write(bytes(ANSWER_BYTES))

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost.set()

    def abort(self) -> None:
        self.aborted.set()


class Connected:
    """A client on one end of a socket, and `Talkative` on the other."""

    def __init__(self, talkative: Talkative, transport: asyncio.Transport, client: socket.socket) -> None:
        self.talkative, self.transport = talkative, transport
        self._client, self._loop = client, asyncio.get_running_loop()

    async def send(self) -> None:
        await self._loop.sock_sendall(self._client, b"x")

    async def send_until_it_is_not_read(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while self.transport.is_reading():
                await self.send()
                await asyncio.sleep(0)

    async def receive(self) -> int:
        """Returns the number of bytes."""
        return len(await self._loop.sock_recv(self._client, MIB))

    def waits_for_the_client(self) -> "asyncio.Future[None]":
        return asyncio.ensure_future(pace_of(cast(asyncssh.SSHServerConnection, self.talkative)).drained())


@asynccontextmanager
async def connected() -> AsyncIterator[Connected]:
    talkative = Talkative()
    ours, theirs = socket.socketpair()
    theirs.settimeout(0)
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: PacedConnection(cast(asyncssh.SSHServerConnection, talkative)), ours
    )
    try:
        yield Connected(talkative, transport, theirs)
    finally:
        theirs.close()
        transport.abort()
        await talkative.lost.wait()  # uvloop does not close while a connection is open


def test_nothing_is_read_from_a_client_that_reads_nothing() -> None:
    async def run() -> None:
        async with connected() as made:
            await made.send_until_it_is_not_read()
            assert MIB < made.transport.get_write_buffer_size() < 2 * MIB
            drained = made.waits_for_the_client()
            received = await made.receive()
            assert not drained.done()
            while received < made.talkative.answered * ANSWER_BYTES:
                received += await made.receive()
            await asyncio.wait_for(drained, WITHIN_S)
            assert made.transport.is_reading()

    uvloop.run(run())


def test_who_waits_for_a_client_is_told_that_it_is_gone() -> None:
    async def run() -> None:
        async with connected() as made:
            await made.send_until_it_is_not_read()
            drained = made.waits_for_the_client()
            made.transport.abort()
            await asyncio.wait_for(drained, WITHIN_S)

    uvloop.run(run())


def test_a_key_exchange_that_never_ends_stops_the_output() -> None:
    async def run() -> None:
        async with connected() as made:
            made.talkative._deferred_packets = [b"x"]
            drained = made.waits_for_the_client()
            done, _ = await asyncio.wait({drained}, timeout=0.2)
            assert not done
            made.talkative._deferred_packets = []
            await asyncio.wait_for(drained, WITHIN_S)

    uvloop.run(run())


def test_a_client_that_asks_much_during_a_key_exchange_is_disconnected() -> None:
    async def run() -> None:
        async with connected() as made:
            made.talkative._deferred_packets = [b"x"] * 10_001
            await made.send()
            await asyncio.wait_for(made.talkative.aborted.wait(), WITHIN_S)

    uvloop.run(run())


def test_nothing_is_read_while_much_is_unparsed() -> None:
    async def run() -> None:
        async with connected() as made:
            made.talkative._inpbuf = bytes(MIB)
            await made.send_until_it_is_not_read()
            assert made.transport.get_write_buffer_size() < MIB, "this is not why it stops"
            made.talkative._inpbuf = b""
            async with asyncio.timeout(WITHIN_S):
                while not made.transport.is_reading():
                    await asyncio.sleep(0)

    uvloop.run(run())


def test_single_bytes_are_joined() -> None:
    pieces = JoinedPieces()
    for number in range(100_000):
        pieces.append((b"x", number // 50_000))
    assert len(pieces) < 100
    assert b"".join(data for data, _kind in pieces) == b"x" * 100_000
    assert {kind for _data, kind in pieces} == {0, 1}


def test_a_host_key_is_proven_once() -> None:
    keys = ProvenOnce({b"a": "key"})
    assert list(keys.keys()) == [b"a"]
    assert keys[b"a"] == "key"
    with pytest.raises(KeyError):
        keys[b"a"]


@pytest.mark.parametrize(
    ("function", "member"),
    [
        (asyncssh.connection.SSHConnection.data_received, "_inpbuf += data"),
        (asyncssh.connection.SSHConnection.send_packet, "_deferred_packets.append("),
        (asyncssh.channel.SSHChannel._accept_data, "_recv_buf.append((data, datatype))"),
        (asyncssh.channel.SSHChannel._deliver_data, "self._init_recv_window - self._recv_window"),
        (asyncssh.channel.SSHChannel._process_close, "_recv_state = 'close_pending'"),
        (asyncssh.channel.SSHServerChannel._process_env_request, "_env[key] = value"),
        (
            asyncssh.SSHServerConnection._process_hostkeys_prove_00_at_openssh_dot_com_global_request,
            "_all_server_host_keys[key_data]",
        ),
    ],
)
def test_asyncssh_has_the_members_that_mooring_uses(function: Callable[..., Any], member: str) -> None:
    """They are private: an upgrade may change them, and the bounds would silently be gone."""
    assert member in inspect.getsource(function)
