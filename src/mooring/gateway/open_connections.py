"""How many connections clients may have open: before they have authenticated, and after."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, Generic, TypeVar

from mooring.auth.rate_limits import decrement
from mooring_client.errors import TooManyStreams

# Connections that have not authenticated yet: of one network, and in total.
UNAUTHENTICATED_PER_NETWORK: Final = 100
UNAUTHENTICATED: Final = 1000
# Connections that have: of one project, or of a person with several, and in total. One of SSH takes 0.7 MiB.
CONNECTIONS_PER_PROJECT: Final = 256
CONNECTIONS: Final = 2048

Client = TypeVar("Client")


class OpenConnections(Generic[Client]):
    """The connections of one protocol in this process. For the event loop's thread only.

    Args:
        name: of such connections, for users.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unauthenticated: dict[Client, str] = {}  # connection -> network
        self._of_network: Counter[str] = Counter()
        self.authenticated: dict[Client, str] = {}  # connection -> whose
        self._of_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self.authenticated)

    def __iter__(self) -> Iterator[Client]:
        return iter([*self._unauthenticated, *self.authenticated])

    def connected(self, connection: Client, network: str) -> bool:
        """Count a new connection. Returns False if there are too many that have not authenticated."""
        if self._of_network[network] >= UNAUTHENTICATED_PER_NETWORK:
            return False
        if len(self._unauthenticated) >= UNAUTHENTICATED:
            return False
        self._unauthenticated[connection] = network
        self._of_network[network] += 1
        return True

    def authenticate(self, connection: Client, projects: Collection[str]) -> None:
        """Count the connection for the first of the projects that has room. It may have been another's.

        Raises:
            TooManyStreams: none has, or the gateway has too many connections.
        """
        if self.authenticated.get(connection) in projects:
            return
        if len(self.authenticated) >= CONNECTIONS:
            raise TooManyStreams("this gateway has too many connections; try again soon")
        with_room = [each for each in projects if self._of_project[each] < CONNECTIONS_PER_PROJECT]
        if not with_room:
            raise TooManyStreams(
                f"your project has {CONNECTIONS_PER_PROJECT} {self._name} open; close one first"
            )
        self.lost(connection)
        self.authenticated[connection] = with_room[0]
        self._of_project[with_room[0]] += 1

    def lost(self, connection: Client) -> None:
        if (network := self._unauthenticated.pop(connection, None)) is not None:
            decrement(self._of_network, network)
        if (project := self.authenticated.pop(connection, None)) is not None:
            decrement(self._of_project, project)
