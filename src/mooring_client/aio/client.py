"""The asynchronous client."""

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from mooring_client import answers
from mooring_client.aio.transport import AsyncTransport
from mooring_client.calls import Call
from mooring_client.endpoint import resolve
from mooring_client.reconnecting import DEFAULT_RECONNECT_S

if TYPE_CHECKING:
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
    from mooring_client.aio.resources.templates import AsyncTemplates
    from mooring_client.aio.resources.users import AsyncUsers
    from mooring_client.aio.resources.volumes import AsyncVolumes
    from mooring_client.aio.resources.webhooks import AsyncWebhooks

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 2


class AsyncMooring:
    """A client of one server.

        async with AsyncMooring() as client:
            instance = await client.instances.create("pytorch/pytorch:2.8.0", gpus=2)

    Args:
        url, api_key, context: None: from the environment or the current context; see endpoint.py.
        timeout_s: how long the server may be silent during a request.
        max_retries: how often a failed request is repeated; every repetition is safe.
        reconnect_s: how long to try to reach the server again while logs or events are followed.
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

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        extra_s: float = 0,
    ) -> Any:
        """Send any request, and return the JSON of the answer as it is; None: the answer has no body.

        Args:
            path: with all IDs quoted; `calls.path` does that.
            extra_s: how long the answer may take beyond the client's timeout.
        """
        return await self._transport.send(
            Call(
                operation="",
                method=method,
                path=path,
                read=answers.json,
                params=params or {},
                body=body,
                headers=headers or {},
                extra_s=extra_s,
            )
        )

    @cached_property
    def api_keys(self) -> "AsyncApiKeys":
        from mooring_client.aio.resources.api_keys import AsyncApiKeys

        return AsyncApiKeys(self._transport)

    @cached_property
    def audit(self) -> "AsyncAudit":
        from mooring_client.aio.resources.audit import AsyncAudit

        return AsyncAudit(self._transport)

    @cached_property
    def events(self) -> "AsyncEvents":
        from mooring_client.aio.resources.events import AsyncEvents

        return AsyncEvents(self._transport)

    @cached_property
    def gpus(self) -> "AsyncGpus":
        from mooring_client.aio.resources.gpus import AsyncGpus

        return AsyncGpus(self._transport)

    @cached_property
    def instance_groups(self) -> "AsyncInstanceGroups":
        from mooring_client.aio.resources.instance_groups import AsyncInstanceGroups

        return AsyncInstanceGroups(self._transport)

    @cached_property
    def instances(self) -> "AsyncInstances":
        from mooring_client.aio.resources.instances import AsyncInstances

        return AsyncInstances(self._transport)

    @cached_property
    def nodes(self) -> "AsyncNodes":
        from mooring_client.aio.resources.nodes import AsyncNodes

        return AsyncNodes(self._transport)

    @cached_property
    def projects(self) -> "AsyncProjects":
        from mooring_client.aio.resources.projects import AsyncProjects

        return AsyncProjects(self._transport)

    @cached_property
    def queue(self) -> "AsyncPendingQueue":
        from mooring_client.aio.resources.queue import AsyncPendingQueue

        return AsyncPendingQueue(self._transport)

    @cached_property
    def registries(self) -> "AsyncRegistries":
        from mooring_client.aio.resources.registries import AsyncRegistries

        return AsyncRegistries(self._transport)

    @cached_property
    def reservations(self) -> "AsyncReservations":
        from mooring_client.aio.resources.reservations import AsyncReservations

        return AsyncReservations(self._transport)

    @cached_property
    def secrets(self) -> "AsyncSecrets":
        from mooring_client.aio.resources.secrets import AsyncSecrets

        return AsyncSecrets(self._transport)

    @cached_property
    def service(self) -> "AsyncService":
        from mooring_client.aio.resources.service import AsyncService

        return AsyncService(self._transport)

    @cached_property
    def ssh_keys(self) -> "AsyncSshKeys":
        from mooring_client.aio.resources.ssh_keys import AsyncSshKeys

        return AsyncSshKeys(self._transport)

    @cached_property
    def templates(self) -> "AsyncTemplates":
        from mooring_client.aio.resources.templates import AsyncTemplates

        return AsyncTemplates(self._transport)

    @cached_property
    def users(self) -> "AsyncUsers":
        from mooring_client.aio.resources.users import AsyncUsers

        return AsyncUsers(self._transport)

    @cached_property
    def volumes(self) -> "AsyncVolumes":
        from mooring_client.aio.resources.volumes import AsyncVolumes

        return AsyncVolumes(self._transport)

    @cached_property
    def webhooks(self) -> "AsyncWebhooks":
        from mooring_client.aio.resources.webhooks import AsyncWebhooks

        return AsyncWebhooks(self._transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
