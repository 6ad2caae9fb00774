# Generated from aio/client.py: change that file, and run `make client`.
"""The client."""

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from mooring_client import answers
from mooring_client.calls import Call
from mooring_client.endpoint import resolve
from mooring_client.reconnecting import DEFAULT_RECONNECT_S
from mooring_client.sync.transport import Transport

if TYPE_CHECKING:
    from mooring_client.sync.resources.api_keys import ApiKeys
    from mooring_client.sync.resources.audit import Audit
    from mooring_client.sync.resources.events import Events
    from mooring_client.sync.resources.gpus import Gpus
    from mooring_client.sync.resources.instance_groups import InstanceGroups
    from mooring_client.sync.resources.instances import Instances
    from mooring_client.sync.resources.nodes import Nodes
    from mooring_client.sync.resources.projects import Projects
    from mooring_client.sync.resources.queue import PendingQueue
    from mooring_client.sync.resources.registries import Registries
    from mooring_client.sync.resources.reservations import Reservations
    from mooring_client.sync.resources.secrets import Secrets
    from mooring_client.sync.resources.service import Service
    from mooring_client.sync.resources.ssh_keys import SshKeys
    from mooring_client.sync.resources.templates import Templates
    from mooring_client.sync.resources.users import Users
    from mooring_client.sync.resources.volumes import Volumes
    from mooring_client.sync.resources.webhooks import Webhooks

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 2


class Mooring:
    """A client of one server.

        with Mooring() as client:
            instance = client.instances.create("pytorch/pytorch:2.8.0", gpus=2)

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
        http: httpx.Client | None = None,
    ) -> None:
        self.endpoint = resolve(url, api_key, context)
        self._transport = Transport(self.endpoint, timeout_s, max_retries, reconnect_s, http)

    def request(
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
        return self._transport.send(
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
    def api_keys(self) -> "ApiKeys":
        from mooring_client.sync.resources.api_keys import ApiKeys

        return ApiKeys(self._transport)

    @cached_property
    def audit(self) -> "Audit":
        from mooring_client.sync.resources.audit import Audit

        return Audit(self._transport)

    @cached_property
    def events(self) -> "Events":
        from mooring_client.sync.resources.events import Events

        return Events(self._transport)

    @cached_property
    def gpus(self) -> "Gpus":
        from mooring_client.sync.resources.gpus import Gpus

        return Gpus(self._transport)

    @cached_property
    def instance_groups(self) -> "InstanceGroups":
        from mooring_client.sync.resources.instance_groups import InstanceGroups

        return InstanceGroups(self._transport)

    @cached_property
    def instances(self) -> "Instances":
        from mooring_client.sync.resources.instances import Instances

        return Instances(self._transport)

    @cached_property
    def nodes(self) -> "Nodes":
        from mooring_client.sync.resources.nodes import Nodes

        return Nodes(self._transport)

    @cached_property
    def projects(self) -> "Projects":
        from mooring_client.sync.resources.projects import Projects

        return Projects(self._transport)

    @cached_property
    def queue(self) -> "PendingQueue":
        from mooring_client.sync.resources.queue import PendingQueue

        return PendingQueue(self._transport)

    @cached_property
    def registries(self) -> "Registries":
        from mooring_client.sync.resources.registries import Registries

        return Registries(self._transport)

    @cached_property
    def reservations(self) -> "Reservations":
        from mooring_client.sync.resources.reservations import Reservations

        return Reservations(self._transport)

    @cached_property
    def secrets(self) -> "Secrets":
        from mooring_client.sync.resources.secrets import Secrets

        return Secrets(self._transport)

    @cached_property
    def service(self) -> "Service":
        from mooring_client.sync.resources.service import Service

        return Service(self._transport)

    @cached_property
    def ssh_keys(self) -> "SshKeys":
        from mooring_client.sync.resources.ssh_keys import SshKeys

        return SshKeys(self._transport)

    @cached_property
    def templates(self) -> "Templates":
        from mooring_client.sync.resources.templates import Templates

        return Templates(self._transport)

    @cached_property
    def users(self) -> "Users":
        from mooring_client.sync.resources.users import Users

        return Users(self._transport)

    @cached_property
    def volumes(self) -> "Volumes":
        from mooring_client.sync.resources.volumes import Volumes

        return Volumes(self._transport)

    @cached_property
    def webhooks(self) -> "Webhooks":
        from mooring_client.sync.resources.webhooks import Webhooks

        return Webhooks(self._transport)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
