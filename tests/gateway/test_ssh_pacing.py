"""The gateway keeps a bounded amount of data for an SSH client that does not read."""

import asyncio
import socket
from typing import Any, cast

import asyncssh

from mooring.gateway.ssh.pacing import PacedConnection, pace_of

MIB = 1024 * 1024
WITHIN_S = 30


class Talkative:
    """In place of asyncssh: answers each piece of data with 64 KiB."""

    def __init__(self) -> None:
        self.answered = 0
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

    asyncio.run(run())


def test_who_waits_for_a_client_is_told_that_it_is_gone() -> None:
    async def run() -> None:
        talkative = Talkative()
        transport, client = await connected(talkative)
        await asyncio.wait_for(write_until_blocked(client, transport), WITHIN_S)
        drained = asyncio.ensure_future(pace_of(cast(asyncssh.SSHServerConnection, talkative)).drained())
        client.close()
        transport.abort()
        await asyncio.wait_for(drained, WITHIN_S)

    asyncio.run(run())
