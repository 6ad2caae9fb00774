"""Launches, uses and ends a cluster with SkyPilot itself, on a node of the test bed with a real dockerd.

    python -m tests.skypilot.launch IMAGE.tar

Run by hand: it needs what `tests/skypilot/image.sh` builds (1 GB), 4 GB of memory and some minutes.
The image's packages suffice, so nothing is downloaded: the containers of the test bed have no way out.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.testbed import isolation
from tests.testbed.dockerd import DockerNode
from tests.testbed.workspace import Workspace
from tests.walk.cli_client import CliClient
from tests.walk.product import AgentProcess, GatewayProcess, ServerProcess, clean_environment

IMAGE = "mooring-test/skypilot-ready:1"
SKY = Path(__file__).parent / ".venv" / "bin"
COMMANDS = (
    "sky check primeintellect",
    "sky launch --yes --cluster c1 --infra primeintellect --gpus H100:1 'echo GPUs: $NVIDIA_VISIBLE_DEVICES'",
    "sky status c1",
    "sky exec --cluster c1 'echo job two; python3 --version'",
    "sky queue c1",
    "sky logs c1 2",
    "sky down --yes c1",
    "sky api stop",
)


def main(layer: Path) -> int:
    workspace = Workspace()
    isolation.make_bridge(workspace.prefix, workspace.root_address)
    node = DockerNode(workspace)
    try:
        node.start()
        _import(node, layer)
        with TemporaryDirectory(prefix="skypilot-", dir="/tmp") as folder:
            return _with_product(workspace, node, Path(folder))
    finally:
        node.destroy()
        workspace.release()


def _import(node: DockerNode, layer: Path) -> None:
    repository, tag = IMAGE.split(":")
    changes = ["ENV HOME=/root", "ENV UV_OFFLINE=1", 'CMD ["bash"]']
    node.client.api.timeout = 600
    node.client.api.import_image_from_file(str(layer), repository=repository, tag=tag, changes=changes)


def _with_product(workspace: Workspace, node: DockerNode, folder: Path) -> int:
    host, port = workspace.root_address, workspace.take_port()
    ssh_port = workspace.take_port()
    settings = {"MOORING_SKYPILOT_IMAGE": IMAGE, "MOORING_SSH_HOST": host, "MOORING_SSH_PORT": str(ssh_port)}
    server = ServerProcess(folder / "server", host, port, **settings)
    server.start()
    agent = AgentProcess(node, server, folder / "agent", gpus=2)
    agent.start()
    gateway = GatewayProcess(server.environment, folder, host, workspace.take_port(), ssh_port)
    try:
        with server.client as admin:
            agent.await_ready(admin)
        gateway.start()
        configured = CliClient(server.url, folder / "home").run("compat", "skypilot")
        print(configured.stdout.decode(), configured.stderr.decode())
        return max(_run(command, folder / "home") for command in COMMANDS)
    finally:
        gateway.stop()
        agent.close()
        server.stop()


def _run(command: str, home: Path) -> int:
    environment = clean_environment() | {
        "HOME": str(home),
        "PATH": f"{SKY}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    print(f"$ {command}", flush=True)
    began = time.monotonic()
    argv = ["bash", "-c", command]
    done = subprocess.run(argv, env=environment, cwd=home, timeout=900, check=False, stderr=subprocess.STDOUT)
    print(f"[exit code {done.returncode} after {time.monotonic() - began:.0f} s]", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
