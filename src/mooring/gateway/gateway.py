"""The process of `mooring gateway`: SSH and the port proxy for clients, and an HTTP listener for nodes."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Final

import uvloop

from mooring.auth.credentials import Credentials
from mooring.auth.rate_limits import FailedAttempts, RequestRates
from mooring.control.tenants.encryption import Encryptor
from mooring.db.notifications import listeners
from mooring.db.operator_errors import DatabaseProblem
from mooring.db.session import Database
from mooring.gateway.docker.gateway import DockerGateway
from mooring.gateway.keys import GatewayKeys
from mooring.gateway.node_app import create_node_app
from mooring.gateway.node_server import NodeServer
from mooring.gateway.ports.callers import PortUsers
from mooring.gateway.ports.listener import ProxyListener
from mooring.gateway.ports.own_credentials import OwnCredentials
from mooring.gateway.ports.programs import Programs
from mooring.gateway.ports.shared import ProxyShared
from mooring.gateway.ssh.listener import SshListener
from mooring.gateway.ssh.shared import SshShared
from mooring.gateway.ssh.users import SshUsers
from mooring.settings import Settings
from mooring.streams.node_streams import StreamOpener

_CHECK_EVERY_S: Final = 0.1
_SENT_WITHIN_S: Final = 2.0
_RESTARTING: Final = "the gateway is shutting down; connect again"


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """Where the gateway listens.

    Attributes:
        nodes: the URL for nodes.
        ssh_port: None: SSH is off.
        proxy_url: None: the port proxy is off.
        docker_port: None: Docker clients are off.
    """

    nodes: str
    ssh_port: int | None
    proxy_url: str | None
    docker_port: int | None


class CannotListen(Exception):
    """Cannot use an address; the text says why, and what to do."""


class Gateway:
    """Serves until SIGTERM or SIGINT; then open sessions may continue for a while.

    Args:
        database: open and migrated.
        on_started: called once all listeners accept connections.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        encryptor: Encryptor,
        on_started: Callable[[GatewayAddresses], None],
    ) -> None:
        self._settings, self._database = settings, database
        self._on_started = on_started
        limited = settings.rate_limits == "on"
        self._failures = FailedAttempts(on=limited)
        self._opener = StreamOpener(database, settings.gateway_url)
        self._problem: DatabaseProblem | None = None
        self._parts = listeners(database, self._end_because)
        self._keys = GatewayKeys(database, encryptor)
        self._ssh = SshShared(
            SshUsers(database), self._opener, self._failures, RequestRates(on=limited), self._keys,
            idle_s=settings.ssh_idle_s, longest_s=settings.ssh_longest_s,
        )  # fmt: skip
        self._credentials = Credentials(database, self._failures)
        self._proxy = self._proxy_of(settings)

    def _proxy_of(self, settings: Settings) -> ProxyListener | None:
        """None: it is off."""
        urls = settings.port_urls
        if urls is None:
            return None
        own = OwnCredentials(self._database, settings.oidc_issuer)
        users = PortUsers(self._database, self._credentials, self._ssh.users, self._keys, own)
        networks = settings.trusted_proxies.split(",") if settings.behind_tls_proxy else []
        trusted = [ip_network(each) for each in networks]
        return ProxyListener(ProxyShared(users, Programs(self._opener, users), urls, trusted))

    def _end_because(self, problem: DatabaseProblem) -> None:
        self._problem = problem
        signal.raise_signal(signal.SIGTERM)

    def run(self) -> None:
        """Raises DatabaseProblem: the database was restored or failed over; CannotListen."""
        for part in self._parts:
            part.start()
        try:
            uvloop.run(self._serve())
        finally:
            for part in self._parts:
                part.stop()
            self._database.dispose()
        if self._problem is not None:
            raise self._problem

    async def _serve(self) -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        settings = self._settings
        listener = SshListener(self._ssh)
        await listener.prepare()
        docker = DockerGateway(settings, self._database, self._credentials, self._opener)
        app = create_node_app(self._database, self._credentials, self._opener, listener.serve)
        with _explained("nodes", settings.gateway_host, settings.gateway_port, "MOORING_GATEWAY"):
            nodes = NodeServer(settings, app)
        self._opener.url = self._opener.url or nodes.url
        serving = asyncio.create_task(nodes.run_until_stopped())
        try:
            if settings.ssh_port:
                with _explained("SSH", settings.ssh_host, settings.ssh_port, "MOORING_SSH"):
                    await listener.listen(settings.ssh_host, settings.ssh_port)
            if self._proxy is not None:
                with _explained("the port proxy", settings.proxy_host, settings.proxy_port, "MOORING_PROXY"):
                    await self._proxy.listen(settings.proxy_host, settings.proxy_port)
            if settings.docker_port:
                with _explained("Docker", settings.docker_host, settings.docker_port, "MOORING_DOCKER"):
                    await docker.listen()
            self._on_started(self._addresses(nodes.url))
            await _first_of(
                stopping.wait(), self._ssh.watch(), self._keys.watch(listener.keys_changed), docker.run(),
                asyncio.shield(serving),
            )  # fmt: skip
            listener.close()
            docker.close()
            await self._drain()
        finally:
            await docker.end()
            self._opener.channels.abort()
            nodes.should_exit = True
            await serving

    def _addresses(self, nodes: str) -> GatewayAddresses:
        settings = self._settings
        return GatewayAddresses(
            nodes,
            settings.ssh_port or None,
            settings.port_urls.base if settings.port_urls else None,
            settings.docker_port or None,
        )

    async def _drain(self) -> None:
        """Let sessions continue for a while, then end them with a message."""
        drain_s = self._settings.gateway_drain_s
        proxy = self._proxy.close(drain_s) if self._proxy is not None else asyncio.sleep(0)
        await asyncio.gather(proxy, self._until_all_ended(drain_s))
        for connection in self._ssh.open:
            connection.disconnect(_RESTARTING)
        await self._until_all_ended(_SENT_WITHIN_S)

    async def _until_all_ended(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while len(self._ssh.open) and loop.time() < until:
            await asyncio.sleep(_CHECK_EVERY_S)


@contextmanager
def _explained(what: str, host: str, port: int, setting: str) -> Iterator[None]:
    """Raises CannotListen instead of OSError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CannotListen(
            f"cannot listen for {what} on {host}, port {port} ({reason}): "
            f"set {setting}_HOST and {setting}_PORT"
        ) from error


async def _first_of(*parts: "Coroutine[Any, Any, Any] | asyncio.Future[Any]") -> None:
    """Wait until one of them ends, and raise its error: a part that fails ends the process."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
