"""The whole product as its users run it: a server process, agent processes on nodes, real containers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.nodes import join_token
from tests.service import ADMIN_KEY, Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.forked import ForkedProcess
from tests.walk.proxy import EngineProxy

MOORING = [sys.executable, "-m", "mooring.cli"]


def clean_environment() -> dict[str, str]:
    """This process's environment without variables that configure Mooring or Docker."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MOORING_", "DOCKER_")) and name != "LD_LIBRARY_PATH"
    }


class Program:
    """One `mooring` process, whose output goes to a file.

    Args:
        command: the arguments of `mooring`.
        node: runs the process in its network; None: in this process's.

    Attributes:
        forked: whether it starts as a fork, without importing the product again; not for measurements.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, node: DockerNode | None = None
    ) -> None:
        self.command, self.environment, self.log = command, environment, log
        self.forked = False
        self._node = node
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.forked:
            network = self._node.namespace if self._node else None
            self._process = ForkedProcess(self.command, self.environment, self.log, network)
            return
        argv = [*MOORING, *self.command]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._node.inside(*argv) if self._node else argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """Kill with SIGKILL, as the kernel or a power failure would."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop with a signal; returns the exit status."""
        return self._end(number)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout_s: float = 20) -> int:
        """Wait until it exits; returns the exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def _wait_until(self, ready: Callable[[], bool], within_s: float) -> None:
        """Wait until it is ready; otherwise kill it and fail."""
        try:
            wait_until(ready, within_s)
        except BaseException:
            self.kill()
            raise

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
        return self._process.wait(60)

    def printed(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def tail(self) -> str:
        return self.printed()[-3000:]

    def processor_s(self) -> float:
        """CPU time of the process, which other programs do not affect."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)


class ServerProcess(Program):
    """`mooring server` on an address that is reachable from the nodes' namespaces."""

    def __init__(self, folder: Path, host: str, port: int, **settings: str) -> None:
        environment = {
            **clean_environment(),
            "MOORING_DATA_DIR": str(folder),
            "MOORING_HOST": host,
            "MOORING_PORT": str(port),
            "MOORING_BEHIND_TLS_PROXY": "true",  # plain HTTP; the network does not leave this machine
            "MOORING_BOOTSTRAP_ADMIN_KEY": ADMIN_KEY,
            "MOORING_REPORT_INTERVAL_S": "1",
            "MOORING_ALLOWED_REGISTRIES": host,  # where the registries of the test bed are
            **settings,
        }
        super().__init__(["server"], environment, folder / "server.log")
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{host}:{port}"
        self.database_url = settings.get("MOORING_DATABASE_URL", f"sqlite:///{folder / 'mooring.db'}")

    @property
    def client(self) -> Client:
        return Client(self.url)

    def start(self, within_s: float = 60) -> None:
        super().start()
        self._wait_until(self._is_ready, within_s)

    def _is_ready(self) -> bool:
        assert self.running, self.tail()
        try:
            # Without `verify=False`, each call would load CA certificates, and so delay the server's start.
            return httpx.get(f"{self.url}/readyz", verify=False).status_code == 200
        except httpx.TransportError:
            return False


class AgentProcess(Program):
    """`mooring agent` on a node of the test bed, with the NVML stand-in for its GPUs.

    The agent reaches Docker through the proxy `engine`, with which a test can intercept single calls.
    """

    def __init__(
        self, node: DockerNode, server: ServerProcess, folder: Path, gpus: int = 8, **settings: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.node, self.folder = node, folder
        self.engine = EngineProxy(node)
        self.gpu_uuids = [f"GPU-{node.name}-{index:04d}" for index in range(gpus)]
        self.nvml = NvmlStandin(folder, *self.fleet())
        environment = {
            **clean_environment(),
            "PATH": node.environment["PATH"],
            "LD_LIBRARY_PATH": self.nvml.environment["LD_LIBRARY_PATH"],
            "NVIDIA_NVML_STANDIN": self.nvml.environment["NVIDIA_NVML_STANDIN"],
            "DOCKER_HOST": self.engine.url,
            "MOORING_DATA_DIR": str(folder),
            "MOORING_NODE_NAME": node.name,
            "MOORING_SERVER_URL": server.url,
            "MOORING_INSECURE_HTTP": "true",
            # The tests run with the distribution's Docker, which is older than the minimum versions.
            "MOORING_ALLOW_UNSAFE_VERSIONS": "true",
            **settings,
        }
        super().__init__(["agent"], environment, folder / "agent.log", node)
        with server.client as admin:
            self.environment["MOORING_JOIN_TOKEN"] = join_token(admin)

    def fleet(self) -> list[str]:
        """The stand-in's configuration: GPUs with UUIDs of this node."""
        return [f"gpus {len(self.gpu_uuids)}"] + [
            f"set {index} uuid {uuid}" for index, uuid in enumerate(self.gpu_uuids)
        ]

    def close(self) -> None:
        """Stop the agent, then its proxy."""
        self.stop()
        self.engine.close()

    def await_ready(self, admin: Client) -> str:
        """Wait until the agent has reported Docker and all GPUs; returns the node's ID."""
        return wait_until(lambda: self._ready_id(admin), 30)

    def _ready_id(self, admin: Client) -> str | None:
        assert self.running, self.tail()
        found = admin.items("/v1/nodes", name=self.node.name)
        ready = bool(found) and found[0]["state"] == "ready" and len(found[0]["gpus"]) == len(self.gpu_uuids)
        return found[0]["id"] if ready else None


class GatewayProcess(Program):
    """`mooring gateway` of a server, with SSH, and with what has a port that is not 0."""

    def __init__(
        self,
        server_environment: Mapping[str, str],
        folder: Path,
        host: str,
        port: int,
        ssh_port: int,
        proxy_port: int = 0,
        docker_port: int = 0,
        **settings: str,
    ) -> None:
        self.host, self.port, self.ssh_port = host, port, ssh_port
        self.proxy_port, self.docker_port = proxy_port, docker_port
        environment = dict(server_environment) | {
            "MOORING_GATEWAY_HOST": host,
            "MOORING_GATEWAY_PORT": str(port),
            "MOORING_GATEWAY_URL": f"http://{host}:{port}",
            "MOORING_SSH_HOST": host,
            "MOORING_SSH_PORT": str(ssh_port),
            "MOORING_PROXY_HOST": host,
            "MOORING_PROXY_PORT": str(proxy_port),
            "MOORING_DOCKER_HOST": host,
            "MOORING_DOCKER_PORT": str(docker_port),
            **settings,
        }
        super().__init__(["gateway"], environment, folder / "gateway.log")

    def start(self) -> None:
        self.log.unlink(missing_ok=True)
        super().start()
        self._wait_until(self._has_started, 60)

    def _has_started(self) -> bool:
        assert self.running, self.tail()
        return ("Ports" if self.proxy_port else "SSH") in self.printed()


@contextmanager
def running_gateway(
    server_environment: Mapping[str, str],
    workspace: Workspace,
    folder: Path,
    host: str,
    *,
    proxy: bool = False,
    docker: bool = False,
    **settings: str,
) -> Iterator[GatewayProcess]:
    """Within the block, a gateway on ports of its own."""
    ports = [workspace.take_port() if wanted else 0 for wanted in (True, True, proxy, docker)]
    gateway = GatewayProcess({**server_environment, **settings}, folder, host, *ports)
    gateway.forked = True
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()
        for port in filter(None, ports):
            workspace.give_back_port(port)
