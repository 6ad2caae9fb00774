"""What the connections of Docker clients share: limits, callers, the database, the API, and open streams."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from cachetools import TTLCache
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from mooring.auth.credentials import Credentials, LiveAccess
from mooring.auth.rate_limits import ActionClass, NodeStreams, RequestRates
from mooring.control.instances import docker_containers
from mooring.control.instances.docker_containers import FoundContainer
from mooring.control.instances.streams import Requested
from mooring.core.access import Access, Caller, Permission, lacking
from mooring.db import failures
from mooring.db.session import Database
from mooring.gateway.docker.api import ApiClient
from mooring.gateway.docker.http import DockerConnection, DockerRequest
from mooring.gateway.open_connections import OpenConnections
from mooring.schemas.agent_streams import ExecRequest, StreamStatus, WindowSize
from mooring.streams.node_streams import NodeStream, StreamOpener
from mooring.streams.tasks import cancelled
from mooring_client.errors import TooManyStreams, Unauthorized
from mooring_client.stream_messages import Channel

STREAMS_PER_PROJECT_AND_NODE: Final = 256
_EXECS: Final = 20_000
_PULLED: Final = 20_000
_EXECS_OF_PROJECT: Final = 1000
_EXEC_KEPT_S: Final = 3600.0

Result = TypeVar("Result")


class CopiedStream(Protocol):
    """What is copied to a client: a stream, or something like one."""

    @property
    def revoked(self) -> asyncio.Event: ...

    async def receive(self) -> tuple[Channel, bytes] | StreamStatus: ...

    async def send(self, channel: Channel, data: bytes) -> bool: ...

    async def close(self) -> None: ...


@dataclass
class DockerExec:
    """A command that a client has created. `stream` while it runs."""

    id: str
    caller_id: str
    project: str  # as `Caller.limited_as`
    container_id: str
    instance_id: str
    request: ExecRequest
    window: WindowSize | None = None
    stream: NodeStream | None = None
    has_started: bool = False
    exit_code: int | None = None


@dataclass
class AttachedClients:
    """The attached clients of one container, and the size of its terminal."""

    window: WindowSize | None = None
    waiting: int = 0  # whose streams are not open yet
    streams: list[CopiedStream] = field(default_factory=list)


class DockerShared:
    """See the module."""

    def __init__(
        self, database: Database, credentials: Credentials, opener: StreamOpener, api: ApiClient, *,
        rate_limits: bool,
    ) -> None:  # fmt: skip
        self.database, self.credentials, self.opener, self.api = database, credentials, opener, api
        self.rates = RequestRates(on=rate_limits)
        self.connections: OpenConnections[DockerConnection] = OpenConnections("connections of Docker clients")
        self.node_streams = NodeStreams(STREAMS_PER_PROJECT_AND_NODE)
        self.execs: TTLCache[str, DockerExec] = TTLCache(_EXECS, _EXEC_KEPT_S)
        # (caller, image): what clients have pulled, which some look up afterwards. Nothing is pulled here.
        self.pulled: TTLCache[tuple[str, str], None] = TTLCache(_PULLED, _EXEC_KEPT_S)
        self.attached: dict[str, AttachedClients] = {}  # by container id

    async def read(self, act: Callable[[Session], Result]) -> Result:
        return await run_in_threadpool(self._read, act)

    async def write(self, act: Callable[[Session], Result]) -> Result:
        return await run_in_threadpool(self._write, act)

    def _read(self, act: Callable[[Session], Result]) -> Result:
        with failures.as_unavailable(), self.database.read() as session:
            return act(session)

    def _write(self, act: Callable[[Session], Result]) -> Result:
        with failures.as_unavailable(), self.database.write() as session:
            return act(session)

    def clients_of(self, container_id: str) -> AttachedClients:
        return self.attached.setdefault(container_id, AttachedClients())

    def forget_clients(self, container_id: str) -> None:
        """Call after an attached client has left."""
        found = self.attached.get(container_id)
        if found is not None and not found.streams and not found.waiting:
            del self.attached[container_id]


@dataclass(frozen=True, slots=True)
class DockerCall:
    """One request of an authenticated client."""

    shared: DockerShared
    connection: DockerConnection
    request: DockerRequest
    secret: str
    caller: Caller
    address: str | None

    def access(self, permission: Permission, action: str | None = None) -> Access:
        """Raises Forbidden: the key lacks the permission."""
        if not self.caller.may_somewhere(permission):
            raise lacking(permission)
        return Access(self.caller, permission, action, self.address)

    def live(self, permission: Permission, action: str) -> LiveAccess:
        return LiveAccess(self.access(permission, action), self.shared.credentials, self.secret)

    def count(self, action_class: ActionClass) -> None:
        """Raises TooManyRequests."""
        _headers, error = self.shared.rates.take(self.caller, action_class)
        if error is not None:
            raise error

    async def find(self, reference: str, permission: Permission = Permission.READ) -> FoundContainer:
        """Raises NotFound, Forbidden, BadRequest: as `docker_containers.find`."""
        readable = self.access(Permission.READ)
        found = await self.shared.read(partial(docker_containers.find, access=readable, reference=reference))
        self.access(permission).require(found.project_id, f"No such container: {reference}")
        return found

    async def api(self, method: str, path: str, **more: object) -> dict[str, object]:
        """Raises as `ApiClient.call`."""
        return await self.shared.api.call(self.secret, self.address, method, path, **more)  # type: ignore[arg-type]

    async def open_stream(self, instance_id: str, requested: Requested, action: str) -> NodeStream:
        """Raises as `StreamOpener.open`."""
        live = self.live(Permission.EXEC, action)
        opener = self.shared.opener
        target = await opener.find(live.access, instance_id, requested)
        limit = partial(self.shared.node_streams.opened, is_admin=self.caller.is_admin)
        return await opener.open(live, target, requested, limit)


def bearer(request: DockerRequest) -> str:
    """Raises Unauthorized: there is no key."""
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise Unauthorized(
            "mooring: no key: set DOCKER_CONFIG to a folder with the config.json of GET /v1/docker-context. "
            "Builders send no key; images are not built here: build elsewhere, and push to a registry"
        )
    return secret.strip()


async def send_to_all(clients: AttachedClients, channel: Channel, data: bytes) -> bool:
    """Send to the streams of attached clients until one has taken it. Returns whether one has."""
    for stream in list(clients.streams):
        if await stream.send(channel, data):
            return True
    return False


def require_exec_room(shared: DockerShared, caller: Caller) -> None:
    """Raises TooManyStreams: the project has created too many commands within an hour."""
    if sum(each.project == caller.limited_as for each in shared.execs.values()) >= _EXECS_OF_PROJECT:
        raise TooManyStreams("your project has created too many commands within an hour; try again later")


async def until_gone(call: DockerCall, work: "asyncio.Future[Any]") -> None:
    """Wait for the work, and cancel it when the client is gone."""
    gone = asyncio.ensure_future(call.connection.gone())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        else:
            call.connection.abort()
    finally:
        await cancelled(work, gone)
