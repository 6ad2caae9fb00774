"""A TCP load balancer in front of the replicas, and faults of the link behind it."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from random import Random
from typing import Any

_CHUNK = 65_536
_DELAY_S = 2.0
_LOSS = 0.1
_WITHIN_S = 10

Address = tuple[str, int]


class Link(Enum):
    """What happens to the bytes of a connection."""

    OPEN = "works"
    SILENT = "passes nothing, in either direction"
    ONE_WAY = "passes requests, but no answers"
    RESET = "resets every connection"
    SLOW = "delays every packet by 2 s"
    LOSSY = "ends a connection at every tenth packet"


class Balancer:
    """Forwards each connection to a random replica that accepts it. Runs in a thread of its own.

    After SILENT and ONE_WAY, what was held back is delivered, as TCP does after a partition.
    """

    def __init__(self, listen: Address, replicas: Sequence[Address], rng: Random) -> None:
        self.url = f"http://{listen[0]}:{listen[1]}"
        self._replicas, self._rng = list(replicas), rng
        self._link = Link.OPEN
        self._changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._run(asyncio.start_server(self._accept, *listen))

    @property
    def link(self) -> Link:
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._run(self._set(link))

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WITHIN_S)
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_WITHIN_S)

    async def _set(self, link: Link) -> None:
        self._link = link
        if link is Link.RESET:
            self._reset_all()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _close(self) -> None:
        self._server.close()
        self._reset_all()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_WITHIN_S)

    def _reset_all(self) -> None:
        for writer in self._open:
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._link is Link.RESET:
            return
        there = await self._connect()
        if there is None:
            return
        from_replica, to_replica = there
        self._open.add(to_replica)
        pumps = [
            asyncio.ensure_future(self._pump(reader, to_replica, holding={Link.SILENT})),
            asyncio.ensure_future(self._pump(from_replica, writer, holding={Link.SILENT, Link.ONE_WAY})),
        ]
        try:
            # A half-closed connection ends too: neither HTTP clients nor agents use one.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._open.discard(to_replica)
            to_replica.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for host, port in self._rng.sample(self._replicas, len(self._replicas)):
            with suppress(OSError):
                return await asyncio.open_connection(host, port)
        return None

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, holding: set[Link]
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            while self._link in holding:
                await self._changed.wait()
            if self._link is Link.SLOW:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _DELAY_S)
            if self._link is Link.LOSSY and self._rng.random() < _LOSS:
                return
            writer.write(chunk)
            await writer.drain()
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, with RST: what is buffered is lost."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
