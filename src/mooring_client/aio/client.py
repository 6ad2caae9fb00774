"""The asynchronous client."""

from types import TracebackType
from typing import Final, Self

import httpx

from mooring_client.aio.resources.api_keys import AsyncApiKeys
from mooring_client.aio.resources.audit import AsyncAudit
from mooring_client.aio.resources.events import AsyncEvents
from mooring_client.aio.resources.gpus import AsyncGpus
from mooring_client.aio.resources.instance_groups import AsyncInstanceGroups
from mooring_client.aio.resources.instances import AsyncInstances
from mooring_client.aio.resources.nodes import AsyncNodes
from mooring_client.aio.resources.projects import AsyncProjects
from mooring_client.aio.resources.queue import AsyncPendingQueue
from mooring_client.aio.resources.registries import AsyncRegistries
from mooring_client.aio.resources.reservations import AsyncReservations
from mooring_client.aio.resources.secrets import AsyncSecrets
from mooring_client.aio.resources.service import AsyncService
from mooring_client.aio.resources.ssh_keys import AsyncSshKeys
from mooring_client.aio.resources.users import AsyncUsers
from mooring_client.aio.transport import AsyncTransport
from mooring_client.endpoint import resolve

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 2
DEFAULT_RECONNECT_S: Final = 60.0


class AsyncMooring:
    """A client of one server.

        async with AsyncMooring() as client:
            instance = await client.instances.create("pytorch/pytorch:2.8.0", gpus=2)

    Args:
        url, api_key, context: None: from the environment or the current context; see endpoint.py.
        timeout_s: how long the server may be silent during a request.
        max_retries: how often a failed request is repeated; every repetition is safe.
        reconnect_s: how long the server may be away while logs or events are followed.
        http: an HTTP client with settings of its own, such as a proxy; it is closed with this client.

    Raises:
        NotConfigured: there is no API key, or the URL is not allowed.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        context: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_RETRIES,
        reconnect_s: float = DEFAULT_RECONNECT_S,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self.endpoint = resolve(url, api_key, context)
        self._transport = AsyncTransport(self.endpoint, timeout_s, max_retries, reconnect_s, http)
        self.api_keys = AsyncApiKeys(self._transport)
        self.audit = AsyncAudit(self._transport)
        self.events = AsyncEvents(self._transport)
        self.gpus = AsyncGpus(self._transport)
        self.instance_groups = AsyncInstanceGroups(self._transport)
        self.instances = AsyncInstances(self._transport)
        self.nodes = AsyncNodes(self._transport)
        self.projects = AsyncProjects(self._transport)
        self.queue = AsyncPendingQueue(self._transport)
        self.registries = AsyncRegistries(self._transport)
        self.reservations = AsyncReservations(self._transport)
        self.secrets = AsyncSecrets(self._transport)
        self.service = AsyncService(self._transport)
        self.ssh_keys = AsyncSshKeys(self._transport)
        self.users = AsyncUsers(self._transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
