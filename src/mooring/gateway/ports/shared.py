"""What the connections of the port proxy share: users, programs, and limits."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import h11

from mooring.auth.rate_limits import counted, decrement, network_of
from mooring.core.port_urls import PortUrls
from mooring.gateway.ports import calls
from mooring.gateway.ports.callers import PortUsers
from mooring.gateway.ports.calls import PortCall
from mooring.gateway.ports.heads import Fields, Network
from mooring.gateway.ports.programs import Programs
from mooring_client.errors import TooManyStreams

# Connections in total, and of one network where there is no proxy in front.
CONNECTIONS: Final = 4096
CONNECTIONS_PER_NETWORK: Final = 512
# Requests that are open at the same time: of one network, and to one project. A public port has clients in
# many networks, which must leave connections for other projects.
REQUESTS_PER_NETWORK: Final = 256
REQUESTS_PER_PROJECT: Final = 1024
_CHECK_EVERY_S: Final = 0.05


class Client(Protocol):
    """See `connections.ProxyConnection`."""

    is_idle: bool

    def abort(self) -> None: ...


class OpenRequests:
    """Counts open requests and upgraded connections. For the event loop's thread only."""

    def __init__(self) -> None:
        self._of_network: Counter[str] = Counter()
        self._of_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of_network.total()

    @contextmanager
    def from_network(self, network: str) -> Iterator[None]:
        """Count a request as open during the block. Raises TooManyStreams: the network has too many."""
        if self._of_network[network] >= REQUESTS_PER_NETWORK:
            raise TooManyStreams(
                f"your address has {REQUESTS_PER_NETWORK} requests open here; wait for some of them"
            )
        with counted(self._of_network, network):
            yield

    @contextmanager
    def to_project(self, project_id: str) -> Iterator[None]:
        """Count a request as open during the block. Raises TooManyStreams: the project has too many."""
        if self._of_project[project_id] >= REQUESTS_PER_PROJECT:
            raise TooManyStreams(
                f"the instance's project has {REQUESTS_PER_PROJECT} requests open here; try again soon"
            )
        with counted(self._of_project, project_id):
            yield


class ProxyShared:
    """For the event loop's thread only.

    Args:
        trusted: networks of the TLS proxies in front; empty: there is none.
    """

    def __init__(
        self, users: PortUsers, programs: Programs, urls: PortUrls, trusted: Sequence[Network]
    ) -> None:
        self.users, self.programs, self.urls = users, programs, urls
        self._trusted = trusted
        self._clients: set[Client] = set()
        self._connections: Counter[str] = Counter()
        self.requests = OpenRequests()
        self.is_closing = False

    def __len__(self) -> int:
        """The number of open requests and upgraded connections."""
        return len(self.requests)

    @property
    def connections(self) -> int:
        return len(self._clients)

    def call_of(self, request: h11.Request, fields: Fields, peer: str) -> PortCall | bytes:
        """As `calls.call_of`."""
        return calls.call_of(self.urls, request, fields, peer, self._trusted)

    def connected(self, client: Client, peer: str) -> bool:
        """Count a connection. Returns False if there are too many."""
        network = network_of(peer)
        if len(self._clients) >= CONNECTIONS:
            return False
        if not self._trusted and self._connections[network] >= CONNECTIONS_PER_NETWORK:
            return False
        self._clients.add(client)
        self._connections[network] += 1
        return True

    def lost(self, client: Client, peer: str) -> None:
        if client in self._clients:
            self._clients.remove(client)
            decrement(self._connections, network_of(peer))

    async def drain(self, timeout_s: float) -> None:
        """End idle connections, and after a while all."""
        self.is_closing = True
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        for client in [each for each in self._clients if each.is_idle]:
            client.abort()
        while len(self) and loop.time() < until:
            await asyncio.sleep(_CHECK_EVERY_S)
        for client in list(self._clients):
            client.abort()
        await self.programs.close()
