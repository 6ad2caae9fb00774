# Generated from aio/client.py: change that file, and run `make client`.
"""The client."""

from types import TracebackType
from typing import Final, Self

import httpx

from mooring_client.endpoint import resolve
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
from mooring_client.sync.resources.users import Users
from mooring_client.sync.transport import Transport

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 2
DEFAULT_RECONNECT_S: Final = 60.0


class Mooring:
    """A client of one server.

        with Mooring() as client:
            instance = client.instances.create("pytorch/pytorch:2.8.0", gpus=2)

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
        http: httpx.Client | None = None,
    ) -> None:
        self.endpoint = resolve(url, api_key, context)
        self._transport = Transport(self.endpoint, timeout_s, max_retries, reconnect_s, http)
        self.api_keys = ApiKeys(self._transport)
        self.audit = Audit(self._transport)
        self.events = Events(self._transport)
        self.gpus = Gpus(self._transport)
        self.instance_groups = InstanceGroups(self._transport)
        self.instances = Instances(self._transport)
        self.nodes = Nodes(self._transport)
        self.projects = Projects(self._transport)
        self.queue = PendingQueue(self._transport)
        self.registries = Registries(self._transport)
        self.reservations = Reservations(self._transport)
        self.secrets = Secrets(self._transport)
        self.service = Service(self._transport)
        self.ssh_keys = SshKeys(self._transport)
        self.users = Users(self._transport)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
