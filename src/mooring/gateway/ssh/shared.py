"""What the SSH connections of a gateway share: limits, users, and the check that they may go on."""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

import asyncssh

from mooring.auth.rate_limits import FailedAttempts, NodeStreams, RequestRates
from mooring.core.access import RENEWED_S, Caller
from mooring.core.errors import TooManyStreams, Unavailable
from mooring.gateway.ssh.users import SshUsers
from mooring.streams.node_streams import StreamOpener

# Connections that have not authenticated yet: of one network, and in total.
UNAUTHENTICATED_PER_NETWORK: Final = 100
UNAUTHENTICATED: Final = 1000
# Connections that have: of one project, or of a person with several, and in total. Each takes 0.7 MiB.
CONNECTIONS_PER_PROJECT: Final = 256
CONNECTIONS: Final = 2048
# Streams of a project on one node. An editor opens ten.
STREAMS_PER_PROJECT_AND_NODE: Final = 256


class Connection(Protocol):
    """See `connections.SshConnection`."""

    @property
    def credentials(self) -> Collection[str]: ...

    def require_allowed(self, callers: dict[str, Caller]) -> None: ...

    def disconnect(self, reason: str) -> None: ...


class OpenConnections:
    """The connections of this process, counted. For the event loop's thread only."""

    def __init__(self) -> None:
        self._unauthenticated: dict[Connection, str] = {}  # connection -> network
        self._of_network: Counter[str] = Counter()
        self.authenticated: dict[Connection, str] = {}  # connection -> whose
        self._of_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self.authenticated)

    def connected(self, connection: Connection, network: str) -> bool:
        """Count a new connection. Returns False if there are too many that have not authenticated."""
        if self._of_network[network] >= UNAUTHENTICATED_PER_NETWORK:
            return False
        if len(self._unauthenticated) >= UNAUTHENTICATED:
            return False
        self._unauthenticated[connection] = network
        self._of_network[network] += 1
        return True

    def authenticate(self, connection: Connection, projects: Collection[str]) -> None:
        """Count the connection for the first of the projects that has room.

        Raises:
            TooManyStreams: none has, or the gateway has too many connections.
        """
        if len(self.authenticated) >= CONNECTIONS:
            raise TooManyStreams("this gateway has too many connections; try again soon")
        with_room = [each for each in projects if self._of_project[each] < CONNECTIONS_PER_PROJECT]
        if not with_room:
            raise TooManyStreams(
                f"your project has {CONNECTIONS_PER_PROJECT} SSH connections open; close one first"
            )
        self._forget_unauthenticated(connection)
        self.authenticated[connection] = with_room[0]
        self._of_project[with_room[0]] += 1

    def lost(self, connection: Connection) -> None:
        self._forget_unauthenticated(connection)
        project = self.authenticated.pop(connection, None)
        if project is not None:
            _decrement(self._of_project, project)

    def _forget_unauthenticated(self, connection: Connection) -> None:
        network = self._unauthenticated.pop(connection, None)
        if network is not None:
            _decrement(self._of_network, network)

    def disconnect_all(self, reason: str) -> None:
        for connection in [*self._unauthenticated, *self.authenticated]:
            connection.disconnect(reason)


def _decrement(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


@dataclass(frozen=True)
class SshShared:
    """What connections share.

    Attributes:
        ca_key: the public key that signed certificates.
        idle_s: a connection without data for so long is closed; 0: never.
        longest_s: a connection is closed after this time; 0: never.
    """

    users: SshUsers
    opener: StreamOpener
    failures: FailedAttempts
    rates: RequestRates
    ca_key: asyncssh.SSHKey
    idle_s: float
    longest_s: float
    open: OpenConnections = field(default_factory=OpenConnections)
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
