"""Local ports that are forwarded into containers, by the asynchronous client in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from mooring_client.aio import forwarding as aio
from mooring_client.aio.transport import AsyncTransport
from mooring_client.sync.transport import Transport

Report = aio.Report


@contextmanager
def forwarded(
    transport: Transport,
    instance_id: str,
    port: int,
    local_host: str,
    local_port: int,
    report: Report | None,
) -> Iterator[int]:
    """Forward a local port to a port of a container within the block; yield the local port.

    Args:
        local_port: 0: any free one.
        report: called, in the thread, with the failure of a single connection.

    Raises:
        OSError: the port is in use.
    """
    listening: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        ended = asyncio.Event()
        remote = AsyncTransport(
            transport.endpoint, transport.timeout_s, transport.max_retries, transport.reconnect_s
        )
        try:
            async with aio.forwarded(remote, instance_id, port, local_host, local_port, report) as found:
                listening.set_result((found, asyncio.get_running_loop(), ended))
                await ended.wait()
        finally:
            await remote.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if listening.done():
                raise
            listening.set_exception(error)

    thread = threading.Thread(target=run, name="forward", daemon=True)
    thread.start()
    found, loop, ended = listening.result()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
