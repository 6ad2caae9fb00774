"""A server, a gateway with its port proxy, and a node whose instances' ports are those of this machine.

So a test's own program, on a socket of its own, is what the proxy reaches: it can send any bytes.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mooring.agent.docker.streams.dial import PortStream
from mooring.agent.runtime import ContainerStream, StreamRefused
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent_streams import DialRequest
from tests.nodes import SimulatedNode, simulated_node
from tests.service import ADMIN_KEY, Client
from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, ServerProcess

HOST = "127.0.0.1"
DOMAIN = "apps.test"
WITHIN_S = 20.0


class LoopbackRuntime(SimulatedRuntime):
    """Simulated containers whose ports are those of this machine's loopback."""

    async def dial(self, container_id: str, request: DialRequest) -> ContainerStream:
        made = socket.socket()
        made.settimeout(0)
        try:
            await asyncio.get_running_loop().sock_connect(made, (HOST, request.port))
            return PortStream(made)
        except OSError as error:
            made.close()
            raise StreamRefused("port_not_listening", str(error)) from None


class Program:
    """A tenant's program: `serve` is called in a thread for each connection, and may do what it likes."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _address = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._run, args=[connection], daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self._serve(connection)
        with suppress(OSError):
            connection.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@dataclass
class Proxy:
    """What the tests use."""

    server: ServerProcess
    gateway: GatewayProcess
    node: SimulatedNode
    admin: Client
    domain: str
    _programs: list[Program] = field(default_factory=list)

    def program(self, serve: Callable[[socket.socket], None]) -> Program:
        made = Program(serve)
        self._programs.append(made)
        return made

    def answering(self, answer: bytes) -> Program:
        """A program that sends the same bytes after each head, on one connection."""

        def serve(connection: socket.socket) -> None:
            while read_head(connection):
                connection.sendall(answer)

        return self.program(serve)

    def checked(self) -> Iterator["Proxy"]:
        """For a test's fixture: the test must not make the gateway log an error."""
        before = len(self.gateway.printed())
        yield self
        self.close_programs()
        printed = self.gateway.printed()
        # A gateway that was started again has a new log.
        since = printed[before:] if len(printed) >= before else printed
        assert "Traceback" not in since, since[-5000:]
        assert "ERROR" not in since, since[-5000:]

    def close_programs(self) -> None:
        for program in self._programs:
            program.close()
        self._programs.clear()

    def instance(self, name: str, **fields: Any) -> dict[str, Any]:
        made = self.admin.create(name=name, cpus=1, memory_mib=64, gpus={"count": 0}, **fields)
        return self.admin.wait(made["id"], "running")

    def host(self, port: int, name: str = "box", project: str = "default") -> str:
        return f"{port}-{name}-{project}.{self.domain}"

    def client(self, host: str, key: str | None = ADMIN_KEY, **headers: str) -> httpx.Client:
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.Client(
            base_url=f"http://{HOST}:{self.gateway.proxy_port}",
            headers={"Host": host, **headers},
            timeout=WITHIN_S,
            verify=False,
        )

    def raw(self, data: bytes = b"") -> socket.socket:
        """A connection to the proxy."""
        connection = socket.create_connection((HOST, self.gateway.proxy_port), timeout=WITHIN_S)
        connection.sendall(data)
        return connection

    def exchanged(self, data: bytes) -> bytes:
        """What the proxy answers until it closes the connection."""
        with self.raw(data) as connection:
            return read_all(connection)


def read_head(connection: socket.socket) -> bytes:
    """A head, and nothing after it; empty: the connection has ended."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = connection.recv(1)
        if not data:
            return b""
        head += data
    return head


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def get(host: str, path: str = "/", *fields: str, key: str | None = ADMIN_KEY) -> bytes:
    """The bytes of a request."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *fields]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def running_proxy(
    workspace: Workspace, folder: Path, domain: str, settings: Mapping[str, str] | None = None
) -> Iterator[Proxy]:
    ports = [workspace.take_port() for _ in range(4)]
    with ExitStack() as exits:
        for port in ports:
            exits.callback(workspace.give_back_port, port)
        more = {
            "MOORING_RATE_LIMITS": "off",
            "MOORING_BEHIND_TLS_PROXY": "false",
            "MOORING_PROXY_PORT": str(ports[3]),
            "MOORING_PROXY_DOMAIN": domain,
            "MOORING_PROXY_URL": f"http://{domain or HOST}:{ports[3]}",
            **(settings or {}),
        }
        server = ServerProcess(folder / "server", HOST, ports[0], **more)
        server.forked = True
        server.start()
        exits.callback(server.stop)
        gateway = GatewayProcess(server.environment, folder, HOST, *ports[1:], MOORING_GATEWAY_DRAIN_S="0.5")
        gateway.start()
        exits.callback(gateway.stop)
        admin = exits.enter_context(server.client)
        node = exits.enter_context(
            simulated_node(admin, folder / "node", "sim-1", gpus=0, runtime_kind=LoopbackRuntime)
        )
        yield Proxy(server, gateway, node, admin, domain)
