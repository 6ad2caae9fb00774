"""Local ports that are forwarded into containers; `sync/forwarding.py` is written by hand too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from mooring_client.aio.streams import AsyncPortConnection, connected
from mooring_client.aio.transport import AsyncTransport
from mooring_client.errors import MooringError
from mooring_client.failures import ClientFailure

_CHUNK_BYTES: Final = 64 * 1024

Report = Callable[[MooringError | ClientFailure], None]


@asynccontextmanager
async def forwarded(
    transport: AsyncTransport,
    instance_id: str,
    port: int,
    local_host: str,
    local_port: int,
    report: Report | None,
) -> AsyncIterator[int]:
    """Forward a local port to a port of a container within the block; yield the local port.

    Args:
        local_port: 0: any free one.
        report: called with the failure of a single connection.

    Raises:
        OSError: the port is in use.
    """
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with connected(transport, instance_id, port) as remote:
                await _copy(reader, writer, remote)
        except (MooringError, ClientFailure) as failure:
            if report is not None:
                report(failure)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, local_host, local_port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, remote: AsyncPortConnection
) -> None:
    sending = asyncio.ensure_future(_send(reader, remote))
    try:
        while data := await remote.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        await sending
    except OSError:
        pass  # the local program has closed the connection
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError, ClientFailure):
            await sending


async def _send(reader: asyncio.StreamReader, remote: AsyncPortConnection) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await remote.write(data)
    await remote.close_write()
