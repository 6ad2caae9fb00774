"""What the SSH connections of a gateway share: limits, users, and the check that they may go on."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from mooring.auth.rate_limits import FailedAttempts, NodeStreams, RequestRates
from mooring.core.access import RENEWED_S, Caller
from mooring.gateway.keys import GatewayKeys
from mooring.gateway.open_connections import OpenConnections
from mooring.gateway.ssh.users import SshUsers
from mooring.gateway.ssh.windows import Windows
from mooring.streams.node_streams import StreamOpener
from mooring_client.errors import Unavailable

# Streams of a project on one node. An editor opens ten.
STREAMS_PER_PROJECT_AND_NODE: Final = 256


class Connection(Protocol):
    """See `connections.SshConnection`."""

    @property
    def credentials(self) -> Collection[str]: ...

    def require_allowed(self, callers: dict[str, Caller]) -> None: ...

    def disconnect(self, reason: str) -> None: ...


@dataclass(frozen=True)
class SshShared:
    """What connections share.

    Attributes:
        keys: the host keys, and the public keys that signed certificates.
        idle_s: a connection without data for so long is closed; 0: never.
        longest_s: a connection is closed after this time; 0: never.
    """

    users: SshUsers
    opener: StreamOpener
    failures: FailedAttempts
    rates: RequestRates
    keys: GatewayKeys
    idle_s: float
    longest_s: float
    open: OpenConnections[Connection] = field(default_factory=lambda: OpenConnections("SSH connections"))
    windows: Windows = field(default_factory=Windows)
    node_streams: NodeStreams = field(default_factory=lambda: NodeStreams(STREAMS_PER_PROJECT_AND_NODE))

    async def watch(self) -> None:
        """End connections that may not go on (R29). Runs until it is cancelled."""
        while True:
            await asyncio.sleep(RENEWED_S)
            await self._check()

    async def _check(self) -> None:
        connections = list(self.open.authenticated)
        credentials = {each for connection in connections for each in connection.credentials}
        if not credentials:
            return
        try:
            callers = await self.users.refreshed(credentials)
        except Unavailable:
            return  # without an answer, nothing is known to be revoked
        for connection in connections:
            connection.require_allowed(callers)
