"""Where clients of the port proxy connect."""

import asyncio
import socket
from contextlib import suppress
from typing import Final

from mooring.gateway.ports.connections import ProxyConnection
from mooring.gateway.ports.shared import ProxyShared
from mooring.streams.http_protocol import ConnectionLimits, set_kernel_timeouts

# A client that reads nothing for so long, of an answer that waits for it, is gone.
READER_S: Final = 120.0
_BACKLOG: Final = 2048


class ProxyListener:
    def __init__(self, shared: ProxyShared) -> None:
        self.shared = shared
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> None:
        """Raises OSError: cannot use the address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        set_kernel_timeouts(bound, ConnectionLimits(reader_s=READER_S))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ProxyConnection(self.shared), sock=bound)
        self._sweeping = asyncio.create_task(self.shared.programs.sweep())

    async def close(self, drain_s: float) -> None:
        """Accept no more clients, and end the connections."""
        if self._server is None:
            return
        self._server.close()
        await self.shared.drain(drain_s)
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
