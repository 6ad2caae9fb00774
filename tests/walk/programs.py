"""Programs of others in containers behind the port proxy, on one node: JupyterLab, and one on tornado."""

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect

from tests.service import ADMIN_KEY, Client
from tests.testbed.python_image import JUPYTER, JUPYTER_LAB, PYTHON
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.product import GatewayProcess

DOMAIN = "apps.test"
WITHIN_S = 60.0
KEY = f"Authorization: Bearer {ADMIN_KEY}"
LAB_TOKEN = "a-token-of-jupyter"
TORNADO = (Path(__file__).parent / "tornado_program.py").read_text()
# It prints the fields of each request that it gets.
LAB = f"""
cat > /tmp/config.py <<'END'
def log_fields(handler):
    print("REQUEST", handler.request.uri, dict(handler.request.headers), flush=True)
c.ServerApp.tornado_settings = {{"log_function": log_fields}}
END
exec {JUPYTER_LAB} --config /tmp/config.py --ip 127.0.0.1 --port 8888 --allow-root --no-browser \
    --ServerApp.allow_remote_access=True --IdentityProvider.token={LAB_TOKEN}
"""


@dataclass
class Programs:
    """The addresses of the programs.

    Attributes:
        lab, tornado: the instances.
    """

    cluster: Cluster
    gateway: GatewayProcess
    lab: dict[str, Any]
    tornado: dict[str, Any]

    @property
    def admin(self) -> Client:
        return self.cluster.admin

    def host(self, port: int, name: str) -> str:
        return f"{port}-{name}-default.{DOMAIN}:{self.gateway.proxy_port}"

    def curl(self, *arguments: str, given: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
        """Run curl, for which the hosts of the proxy exist."""
        ports = ((8888, "lab"), (8000, "tornado"), (8001, "tornado"))
        hosts = [f"{self.host(port, name)}:{self.gateway.host}" for port, name in ports]
        always = ("--silent", "--show-error", "--max-time", "60", "--noproxy", "*")
        argv = ["curl", *always, *(part for host in hosts for part in ("--resolve", host)), *arguments]
        return subprocess.run(argv, input=given, capture_output=True, check=False, timeout=90)

    def open_streams(self) -> int:
        """The number of connections that agents have opened to the gateway."""
        connections = psutil.Process(self.gateway.pid).net_connections("tcp")
        return sum(
            each.laddr.port == self.gateway.port and each.status == psutil.CONN_ESTABLISHED
            for each in connections
        )

    def socket(self) -> socket.socket:
        """A connection to the proxy."""
        return socket.create_connection((self.gateway.host, self.gateway.proxy_port), timeout=WITHIN_S)

    def websocket(self, url: str, **options: Any) -> ClientConnection:
        """Open a WebSocket with the library of that name; its caller closes it."""
        options.setdefault("additional_headers", {"Authorization": f"Bearer {ADMIN_KEY}"})
        stream: ClientConnection = connect(url, sock=self.socket(), proxy=None, **options)
        return stream

    @contextmanager
    def client(self, port: int, name: str, **headers: str) -> Iterator[httpx.Client]:
        headers = {"Host": self.host(port, name), **headers}
        url = f"http://{self.gateway.host}:{self.gateway.proxy_port}"
        with httpx.Client(base_url=url, headers=headers, timeout=WITHIN_S, verify=False) as client:
            yield client


def running_programs(cluster: Cluster, gateway: GatewayProcess) -> Programs:
    """Start the programs, and wait until they answer."""
    shared: dict[str, Any] = {"image": JUPYTER, "gpus": {"count": 1}, "memory_mib": 1024, "cpus": 1}
    made = [
        cluster.admin.create(name="lab", command=["sh", "-c", LAB], **shared),
        cluster.admin.create(name="tornado", command=[PYTHON, "-c", TORNADO], **shared),
    ]
    lab, tornado = (cluster.admin.wait(each["id"], "running") for each in made)
    programs = Programs(cluster, gateway, lab, tornado)
    for port, name, path in ((8000, "tornado", "/request"), (8888, "lab", f"/api/status?token={LAB_TOKEN}")):
        with programs.client(port, name, Authorization=f"Bearer {ADMIN_KEY}") as client:
            wait_until(lambda: client.get(path).status_code == 200, WITHIN_S)  # noqa: B023
    return programs


def sockets_of(pid: int) -> int:
    """The number of a process's sockets, also of those in the networks of containers."""
    return sum(name.startswith("socket:") for name in map(_target, Path(f"/proc/{pid}/fd").iterdir()))


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile


def status_lines(verbose: bytes) -> list[int]:
    """The statuses that `curl --verbose` shows, also informational ones."""
    return [int(found) for found in re.findall(rb"^< HTTP/1\.[01] (\d{3})", verbose, re.MULTILINE)]
