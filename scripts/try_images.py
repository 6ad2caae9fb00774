"""Builds the image, starts docker-compose.yml on a private dockerd, and runs an instance with a GPU there.

    sudo .venv/bin/python scripts/try_images.py

Run it as root on Debian, after a change of Dockerfile or docker-compose.yml. It needs debootstrap,
docker-compose and the parts of the test bed. It takes minutes and downloads Debian packages, so CI does not
run it.

No image comes from a registry. A Debian tree with its own Python and PostgreSQL replaces python:3.12-slim and
postgres:16, wheels in that tree replace the package index,
and the stand-ins of the test bed replace NVIDIA's parts.
"""

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.testbed.dockerd import DockerNode  # noqa: E402
from tests.testbed.images import BUSYBOX  # noqa: E402
from tests.testbed.nvml import standin  # noqa: E402
from tests.testbed.waiting import wait_until  # noqa: E402
from tests.testbed.workspace import Workspace  # noqa: E402

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,postgresql,ca-certificates,iptables"
BASE = "mooring-try/python:3"
POSTGRES = "mooring-try/postgres:1"
API = "http://127.0.0.1:8700"

# The behaviour of the official image that docker-compose.yml relies on.
POSTGRES_ENTRYPOINT = """\
#!/bin/bash
set -e
bin=$(echo /usr/lib/postgresql/*/bin)
data=/var/lib/postgresql/data
mkdir -p "$data" && chown postgres: "$data"
owner="setpriv --reuid=postgres --regid=postgres --init-groups --"
if [ ! -e "$data/PG_VERSION" ]; then
    install -m 600 -o postgres /dev/stdin /tmp/password <<<"$POSTGRES_PASSWORD"
    $owner "$bin/initdb" --pgdata="$data" --username="$POSTGRES_USER" --pwfile=/tmp/password \\
        --auth=scram-sha-256 --encoding=UTF8
    rm /tmp/password
    echo 'host all all all scram-sha-256' >>"$data/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_DB" | $owner "$bin/postgres" --single -D "$data" postgres
fi
exec $owner "$bin/postgres" -D "$data" -c 'listen_addresses=*'
"""


def main() -> None:
    workspace = Workspace()
    scratch = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        base = make_base(scratch)
        node = DockerNode(workspace)
        node.start()
        node.load_images()
        log_step("importing the base image")
        import_tree(node, base, BASE)
        try_compose(node, scratch)
    finally:
        log_step("cleaning up")
        workspace.release()
        shutil.rmtree(scratch, ignore_errors=True)


def make_base(scratch: Path) -> Path:
    tree = scratch / "base"
    log_step("making the base image's tree")
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tree))
    log_step("filling its wheelhouse with the pinned packages")
    python = run(
        str(tree / "usr/bin/python3"), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
    ).strip()
    files = (str(ROOT / name) for name in ("requirements.txt", "requirements-build.txt"))
    pins = [option for file in files for option in ("-r", file)]
    run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--require-hashes",
        "--only-binary=:all:", f"--python-version={python}", "--dest", str(tree / "wheels"), *pins,
    )  # fmt: skip
    (tree / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    shutil.rmtree(tree / "var/cache/apt/archives", ignore_errors=True)
    return tree


def import_tree(node: DockerNode, tree: Path, reference: str) -> None:
    archive = subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE)
    imported = ["docker", "import", "-", reference]
    subprocess.run(
        imported, stdin=archive.stdout, stdout=subprocess.DEVNULL, env=docker_environment(node), check=True
    )
    assert archive.wait() == 0


def try_compose(node: DockerNode, scratch: Path) -> None:
    compose = Compose(node, scratch)
    make_postgres(node, scratch / "postgres")
    log_step("docker build")
    compose.run("build")
    print_size(node)
    log_step("docker-compose up")
    compose.run("up", "--detach")
    try:
        check_an_instance(node, compose)
        check_restart(node, compose)
        check_server(node, compose)
    except BaseException:
        print(compose.run("ps"), compose.run("logs", "--tail=40"), file=sys.stderr)
        raise
    finally:
        compose.run("down", "--volumes")


def make_postgres(node: DockerNode, folder: Path) -> None:
    folder.mkdir()
    (folder / "entrypoint").write_text(POSTGRES_ENTRYPOINT)
    (folder / "entrypoint").chmod(0o755)
    (folder / "Dockerfile").write_text(f'FROM {BASE}\nCOPY entrypoint /\nENTRYPOINT ["/entrypoint"]\n')
    run("docker", "build", "--quiet", "--tag", POSTGRES, str(folder), env=docker_environment(node))


def print_size(node: DockerNode) -> None:
    """Print the size that the Dockerfile adds. The size of the base image differs from the real one's."""
    sizes = {name: node.client.images.get(name).attrs["Size"] for name in (BASE, "mooring:local")}
    log_step(f"the image adds {(sizes['mooring:local'] - sizes[BASE]) / 1e6:.0f} MB to its base")


class Compose:
    """Runs docker-compose.yml, with an extra file that adds the stand-ins to the agent."""

    def __init__(self, node: DockerNode, scratch: Path) -> None:
        self.admin_key = secrets.token_hex(24)
        self._environment = docker_environment(node) | {
            "BASE": BASE,
            "POSTGRES_IMAGE": POSTGRES,
            "POSTGRES_PASSWORD": secrets.token_hex(24),
            "MOORING_DATABASE_PASSWORD": secrets.token_hex(24),
            "MOORING_AUDIT_KEYS": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "MOORING_ADMIN_KEY": self.admin_key,
            "MOORING_ENCRYPTION_KEYS": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "MOORING_NODE_NAME": "gpu-1",
            "DOCKER_SOCKET": str(node.socket),
            "NVIDIA_CTK": str(node.bin_dir / "nvidia-ctk"),
            "NVIDIA_RUNTIME_CONFIG": str(make_folder(scratch / "nvidia-container-runtime")),
        }
        self._files = [self._for_compose_1(scratch), self._with_stand_ins(scratch)]

    def _for_compose_1(self, scratch: Path) -> str:
        """docker-compose.yml without an option that Compose 1 of Debian 12 rejects; Compose 2 needs it."""
        original = (ROOT / "docker-compose.yml").read_text()
        path = scratch / "docker-compose.yml"
        path.write_text(re.sub(r"^ +bind: .*\n", "", original, flags=re.MULTILINE))
        return str(path)

    def _with_stand_ins(self, scratch: Path) -> str:
        configuration = make_folder(scratch / "nvml")
        (configuration / "nvml.txt").write_text("gpus 2\n")
        agent = {
            "environment": {
                "LD_LIBRARY_PATH": "/nvml",
                "NVIDIA_NVML_STANDIN": "/nvml-configuration/nvml.txt",
                # Debian's Docker is older than the minimum version.
                "MOORING_ALLOW_UNSAFE_VERSIONS": "true",
            },
            "volumes": [f"{standin.build()}:/nvml:ro", f"{configuration}:/nvml-configuration:ro"],
        }
        path = scratch / "stand-ins.json"
        path.write_text(json.dumps({"services": {"agent": agent}}))
        return str(path)

    def run(self, *arguments: str) -> str:
        files = [option for file in self._files for option in ("-f", file)]
        fixed = ["--project-directory", str(ROOT), "--project-name", "mooring-try"]
        return run("docker-compose", *files, *fixed, *arguments, env=self._environment)


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def check_an_instance(node: DockerNode, compose: Compose) -> None:
    client = Client(node, compose.admin_key)
    log_step("waiting for the node")
    ready = wait_until(client.ready_nodes, 90, 0.5)
    assert [each["name"] for each in ready] == ["gpu-1"], ready
    body = {"image": BUSYBOX, "command": ["sleep", "3600"], "gpus": {"count": 1}, "user": "1000"}
    created = client.call("POST", "/v1/instances", body)
    wait_until(lambda: client.call("GET", f"/v1/instances/{created['id']}")["state"] == "running", 60, 0.2)
    instance = client.call("GET", f"/v1/instances/{created['id']}")
    container = node.client.containers.get(instance["container_id"])
    environment = cast(bytes, container.exec_run("env").output).decode().splitlines()
    uuids = [device["uuid"] for device in instance["devices"]]
    assert f"NVIDIA_VISIBLE_DEVICES={uuids[0]}" in environment
    output = client.call("POST", f"/v1/instances/{created['id']}/exec", {"command": ["id", "-u"]})
    assert (output["exit_code"], output["stdout"]) == (0, "1000\n"), output
    log_step(f"instance {created['id']} runs with {uuids[0]}; simulated: {instance['simulated']}")


def check_restart(node: DockerNode, compose: Compose) -> None:
    """After `down` and a second `up`, the node is the same, and the instance's container runs again."""
    client = Client(node, compose.admin_key)
    before = client.call("GET", "/v1/instances")["items"]
    log_step("docker-compose down and up again")
    compose.run("down")
    compose.run("up", "--detach")
    wait_until(client.ready_nodes, 90, 0.5)
    after = client.call("GET", "/v1/instances")["items"]
    assert containers_of(after) == containers_of(before)
    wait_until(lambda: client.call("GET", f"/v1/instances/{before[0]['id']}")["state"] == "running", 60, 0.2)
    assert len(client.call("GET", "/v1/nodes")["items"]) == 1
    log_step("the same node, the same container")


def containers_of(instances: list[Any]) -> list[tuple[str, str]]:
    return [(instance["id"], instance["container_id"]) for instance in instances]


def check_server(node: DockerNode, compose: Compose) -> None:
    output = compose.run("exec", "-T", "server", "sh", "-c", "id -u; mooring join-token --node-name gpu-2")
    user, token = output.split()
    assert user != "0"
    assert token.startswith("mj_")
    container = node.client.containers.get(compose.run("ps", "--quiet", "server").strip())
    assert container.attrs["State"]["Health"]["Status"] == "healthy"
    began = time.monotonic()
    container.stop()
    took = time.monotonic() - began
    assert container.wait()["StatusCode"] == 0
    log_step(f"the server, healthy and not root, creates join tokens and stops in {took:.1f} s")


class Client:
    """Calls the API, which is published on the loopback of the node's network namespace."""

    def __init__(self, node: DockerNode, key: str) -> None:
        self._node, self._key = node, key

    def call(self, method: str, path: str, body: object = None) -> Any:
        argv = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", "-X", method]
        argv += ["-H", f"Authorization: Bearer {self._key}", API + path]
        if body is not None:
            argv += ["-H", "Content-Type: application/json", "--data", json.dumps(body)]
        return json.loads(run(*self._node.inside(*argv)))

    def ready_nodes(self) -> list[Any]:
        try:
            nodes = self.call("GET", "/v1/nodes")["items"]
        except subprocess.CalledProcessError:
            return []
        return [node for node in nodes if node["state"] == "ready"]


def docker_environment(node: DockerNode) -> dict[str, str]:
    return node.environment | {"DOCKER_HOST": node.url, "DOCKER_BUILDKIT": "0"}


def run(*argv: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def log_step(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("scripts/try_images.py: needs root")
    main()
