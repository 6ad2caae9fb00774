"""The gateway keeps a bounded amount of data for an SSH client that does not read."""

import asyncio
import socket
from typing import Any, cast

import asyncssh
import pytest
import uvloop

from mooring.gateway.ssh.connections import ProvenOnce
from mooring.gateway.ssh.copying import JoinedPieces
from mooring.gateway.ssh.pacing import PacedConnection, pace_of

MIB = 1024 * 1024
WITHIN_S = 30


class Talkative:
    """In place of asyncssh: answers each piece of data with 64 KiB."""

    def __init__(self) -> None:
        self.answered = 0
        self._inpbuf = b""
        self._deferred_packets: list[bytes] = []
        self.aborted = asyncio.Event()
        self._info: dict[str, Any] = {}

    def set_extra_info(self, **info: Any) -> None:
        self._info |= info

    def get_extra_info(self, name: str) -> Any:
        return self._info[name]

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        self.answered += 1
        self._transport.write(bytes(65536))

    def connection_lost(self, _error: Exception | None) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


async def connected(talkative: Talkative) -> tuple[asyncio.Transport, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(0)
    asyncssh_connection = cast(asyncssh.SSHServerConnection, talkative)
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: PacedConnection(asyncssh_connection), ours
    )
    return transport, theirs


async def write_until_blocked(client: socket.socket, transport: asyncio.Transport) -> None:
    """Send single bytes, and let the other side take them, until it reads no more."""
    while transport.is_reading():
        await asyncio.get_running_loop().sock_sendall(client, b"x")
        await asyncio.sleep(0)


def test_nothing_is_read_from_a_client_that_reads_nothing() -> None:
    async def run() -> None:
        talkative = Talkative()
        transport, client = await connected(talkative)
        await asyncio.wait_for(write_until_blocked(client, transport), WITHIN_S)
        assert MIB < transport.get_write_buffer_size() < 2 * MIB
        drained = asyncio.ensure_future(pace_of(cast(asyncssh.SSHServerConnection, talkative)).drained())
        received = 0
        while received < talkative.answered * 65536:
            assert drained.done() is False or transport.get_write_buffer_size() < MIB
            received += len(await asyncio.get_running_loop().sock_recv(client, MIB))
        await asyncio.wait_for(drained, WITHIN_S)
        assert transport.is_reading()
        client.close()
        transport.close()

    uvloop.run(run())


def test_who_waits_for_a_client_is_told_that_it_is_gone() -> None:
    async def run() -> None:
        talkative = Talkative()
        transport, client = await connected(talkative)
        await asyncio.wait_for(write_until_blocked(client, transport), WITHIN_S)
        drained = asyncio.ensure_future(pace_of(cast(asyncssh.SSHServerConnection, talkative)).drained())
        client.close()
        transport.abort()
        await asyncio.wait_for(drained, WITHIN_S)

    uvloop.run(run())


def test_a_key_exchange_that_never_ends_stops_the_output() -> None:
    async def run() -> None:
        talkative = Talkative()
        transport, client = await connected(talkative)
        talkative._deferred_packets = [b"x"]
        drained = asyncio.ensure_future(pace_of(cast(asyncssh.SSHServerConnection, talkative)).drained())
        done, _ = await asyncio.wait({drained}, timeout=0.2)
        assert not done
        talkative._deferred_packets = []
        await asyncio.wait_for(drained, WITHIN_S)
        talkative._deferred_packets = [b"x"] * 10_001
        await asyncio.get_running_loop().sock_sendall(client, b"x")
        await asyncio.wait_for(talkative.aborted.wait(), WITHIN_S)
        client.close()
        transport.close()

    uvloop.run(run())


def test_nothing_is_read_while_much_is_unparsed() -> None:
    async def run() -> None:
        talkative = Talkative()
        transport, client = await connected(talkative)
        talkative._inpbuf = bytes(MIB)
        await asyncio.wait_for(write_until_blocked(client, transport), WITHIN_S)
        assert transport.get_write_buffer_size() < MIB, "this is not why it stops"
        talkative._inpbuf = b""
        await asyncio.wait_for(until_reading(transport), WITHIN_S)
        client.close()
        transport.close()

    uvloop.run(run())


async def until_reading(transport: asyncio.Transport) -> None:
    while not transport.is_reading():
        await asyncio.sleep(0)


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
