"""Tests of the test bed with the real parts."""

import http.client
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import docker.errors
import httpx
import psycopg
import pytest
import requests
from docker.models.containers import Container
from docker.types import DeviceRequest

from tests.testbed import isolation, parts
from tests.testbed.dockerd import TOOLKIT_VERSION, DockerNode
from tests.testbed.fixtures import NewDockerNode, NewPostgresCluster
from tests.testbed.images import PASSWD
from tests.testbed.isolation import CONTROL_GROUPS, NAMESPACES, NETWORK_INTERFACES
from tests.testbed.postgres import PostgresCluster
from tests.testbed.processes import processes_within
from tests.testbed.registry import MEGABYTE, Registry
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace

UUIDS = ["GPU-11111111-2222-4333-8444-555555555555", "GPU-66666666-7777-4888-8999-000000000000"]
CONTAINER_PORT = 8080
HTTPD = f"mkdir /www && echo moored > /www/index.html && httpd -f -p {CONTAINER_PORT} -h /www"
HOST_NETWORK = "host"


@pytest.fixture
def node(docker_node: DockerNode) -> Iterator[DockerNode]:
    yield docker_node
    docker_node.remove_containers()


def run(node: DockerNode, image: str, command: str | list[str] | None = None, **options: Any) -> Container:
    return node.client.containers.run(image, command, detach=True, **options)


def shell(node: DockerNode, image: str, script: str, **options: Any) -> str:
    """Run a container to its end, and return its output.

    The log is read after the end: a followed log of dockerd 20.10 often lacks a last line that has no line
    feed.
    """
    container = run(node, image, ["sh", "-c", script], **options)
    container.wait()
    return str(container.logs().decode())


def first_process(container: Container) -> int:
    container.reload()
    return int(container.attrs["State"]["Pid"])


def variables(pid: int) -> list[str]:
    """The environment of a process. A container is `running` shortly before it has its program's."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


def get(address: str, port: int) -> str:
    with closing(http.client.HTTPConnection(address, port, timeout=5)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()


def serves(address: str, port: int) -> bool:
    try:
        return get(address, port) == "moored\n"
    except OSError:
        return False


def published_port(container: Container) -> int:
    container.reload()
    return int(container.attrs["NetworkSettings"]["Ports"][f"{CONTAINER_PORT}/tcp"][0]["HostPort"])


class TestDevices:
    def test_a_device_request_reaches_the_container(self, node: DockerNode, busybox_image: str) -> None:
        wanted = DeviceRequest(driver="nvidia", device_ids=UUIDS, capabilities=[["gpu"]])
        container = run(node, busybox_image, device_requests=[wanted])
        variable, pid = f"NVIDIA_VISIBLE_DEVICES={','.join(UUIDS)}", first_process(container)
        wait_until(lambda: variable in variables(pid))
        assert [request["DeviceIDs"] for request in container.attrs["HostConfig"]["DeviceRequests"]] == [
            UUIDS
        ]

    def test_a_device_request_overrides_the_images_variable(
        self, node: DockerNode, cuda_env_image: str
    ) -> None:
        wanted = DeviceRequest(driver="nvidia", device_ids=UUIDS[:1], capabilities=[["gpu"]])
        pid = first_process(run(node, cuda_env_image, device_requests=[wanted]))
        visible = wait_until(
            lambda: [line for line in variables(pid) if line.startswith("NVIDIA_VISIBLE_DEVICES=")]
        )
        assert visible[-1] == f"NVIDIA_VISIBLE_DEVICES={UUIDS[0]}"

    def test_an_image_can_request_all_gpus(self, node: DockerNode, cuda_env_image: str) -> None:
        assert shell(node, cuda_env_image, "echo $NVIDIA_VISIBLE_DEVICES") == "all\n"

    def test_the_toolkit_has_a_version(self, node: DockerNode) -> None:
        argv = node.inside("nvidia-ctk", "--version")
        done = subprocess.run(argv, env=node.environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"NVIDIA Container Toolkit CLI version {TOOLKIT_VERSION}\n"


class TestImages:
    def test_programs_users_and_a_command_that_ends_on_sigterm(
        self, node: DockerNode, busybox_image: str
    ) -> None:
        assert shell(node, busybox_image, "cat /etc/passwd").encode() == PASSWD
        assert shell(node, busybox_image, "id -un", user="user") == "user\n"
        assert shell(node, busybox_image, "head -c 70000 /dev/zero | wc -c") == "70000\n"
        container = run(node, busybox_image)
        # The first process of a container ignores SIGTERM until its trap is set; `sleep` starts after that.
        wait_until(lambda: len(container.top()["Processes"]) > 1)
        container.stop(timeout=30)
        assert container.wait()["StatusCode"] == 0


class RootSide(BaseHTTPRequestHandler):
    """A simulated control plane."""

    def do_GET(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(f"hello {self.client_address[0]}".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Quiet."""


@pytest.fixture
def root_side(root_address: str) -> Iterator[socketserver.TCPServer]:
    with ThreadingHTTPServer((root_address, 0), RootSide) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def two_nodes(docker_nodes: Callable[[int], list[DockerNode]]) -> Iterator[list[DockerNode]]:
    nodes = docker_nodes(2)
    yield nodes
    for node in nodes:
        node.remove_containers()


class TestNetwork:
    def test_nodes_and_their_containers_reach_the_root_side(
        self, two_nodes: list[DockerNode], root_side: socketserver.TCPServer, busybox_image: str
    ) -> None:
        address, port = root_side.server_address[:2]
        fetch = f"wget -qO- http://{address!s}:{port}/"
        for node in two_nodes:
            argv = node.inside("busybox", *fetch.split())
            from_node = subprocess.run(argv, env=node.environment, capture_output=True, text=True, check=True)
            assert from_node.stdout == f"hello {node.address}"
            assert shell(node, busybox_image, fetch) == f"hello {node.address}"
            assert shell(node, busybox_image, fetch, network_mode=HOST_NETWORK) == f"hello {node.address}"

    def test_the_root_side_reaches_published_ports(
        self, two_nodes: list[DockerNode], busybox_image: str
    ) -> None:
        """Both nodes publish the same port, in separate namespaces."""
        for node in two_nodes:
            run(node, busybox_image, f"sh -c '{HTTPD}'", ports={f"{CONTAINER_PORT}/tcp": 18080})
        for node in two_nodes:
            assert wait_until(partial(serves, node.address, 18080))

    def test_docker_chooses_a_port(self, node: DockerNode, busybox_image: str) -> None:
        container = run(node, busybox_image, f"sh -c '{HTTPD}'", ports={f"{CONTAINER_PORT}/tcp": None})
        assert wait_until(lambda: serves(node.address, published_port(container)))

    def test_a_disconnected_node_is_unreachable_but_its_daemon_runs(
        self, new_docker_node: NewDockerNode, busybox_image: str
    ) -> None:
        node = new_docker_node()
        run(node, busybox_image, f"sh -c '{HTTPD}'", ports={f"{CONTAINER_PORT}/tcp": 18080})
        wait_until(lambda: serves(node.address, 18080))
        node.disconnect()
        assert not serves(node.address, 18080)
        assert node.client.ping()
        node.reconnect()
        assert wait_until(lambda: serves(node.address, 18080))


class TestFaults:
    def test_a_frozen_daemon_does_not_answer_until_it_is_thawed(self, new_docker_node: NewDockerNode) -> None:
        node = new_docker_node()
        with closing(docker.DockerClient(base_url=node.url, timeout=1)) as client:
            node.freeze()
            with pytest.raises(requests.exceptions.ReadTimeout):
                client.ping()
            node.thaw()
            assert client.ping()

    def test_with_live_restore_a_container_outlives_a_killed_daemon(
        self, new_docker_node: NewDockerNode, busybox_image: str
    ) -> None:
        node = new_docker_node(live_restore=True)
        container = run(node, busybox_image)
        pid = first_process(container)
        node.kill()
        with pytest.raises(requests.exceptions.ConnectionError):
            node.client.ping()
        assert is_alive(pid)
        node.start()
        assert first_process(container) == pid
        assert container.status == "running"

    def test_without_live_restore_a_container_dies_when_the_daemon_comes_back(
        self, new_docker_node: NewDockerNode, busybox_image: str
    ) -> None:
        node = new_docker_node(live_restore=False)
        container = run(node, busybox_image)
        pid = first_process(container)
        node.kill()
        assert is_alive(pid)
        node.start()
        assert first_process(container) == 0
        assert container.status == "exited"

    def test_a_node_without_power_comes_back_with_its_disk_only(
        self, new_docker_node: NewDockerNode, busybox_image: str
    ) -> None:
        node = new_docker_node()
        container = run(node, busybox_image, f"sh -c '{HTTPD}'")
        pid = first_process(container)
        wait_until(lambda: container.exec_run("cat /www/index.html").output == b"moored\n")
        node.power_off()
        assert not is_alive(pid)
        node.start()
        container.reload()
        assert container.status == "exited"
        container.commit("kept")
        assert shell(node, "kept", "cat /www/index.html") == "moored\n"

    def test_the_error_of_a_daemon_that_cannot_start_is_shown(self, new_docker_node: NewDockerNode) -> None:
        node = new_docker_node()
        node.stop()
        node.dockerd.log.unlink()
        (node.folder / "data").rename(node.folder / "elsewhere")
        (node.folder / "data").touch()
        with pytest.raises(
            AssertionError, match=r"dockerd ended with 1:\n.*\n.*canonical path points to a file"
        ):
            node.start()


class TestCleaning:
    def test_a_destroyed_node_is_removed_completely(self, workspace: Workspace, busybox_image: str) -> None:
        parts.require("docker")
        node = DockerNode(workspace)
        node.start()
        node.load_images()
        paused = run(node, busybox_image)
        paused.pause()
        run(node, busybox_image, network_mode=HOST_NETWORK)
        pids = [first_process(paused), node.dockerd.pid, node.containerd.pid, *processes_within(node.folder)]
        sockets = isolation.shim_sockets(node.folder)
        assert len(sockets) == 2
        node.destroy()
        assert not [path for path in sockets if path.exists()]
        assert not [pid for pid in pids if is_alive(pid)]
        assert remains(node.name, node.folder) == []

    def test_the_next_run_removes_the_remains_of_a_killed_run(self, root_address: str) -> None:
        """The killed run had a running node with a container."""
        script = Path(__file__).with_name("abandoned_run.py")
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == -signal.SIGKILL, run.stderr
        folder, *pids = run.stdout.split()
        assert all(is_alive(int(pid)) for pid in pids)
        assert remains(Path(folder).name, Path(folder)) != []
        sockets = isolation.shim_sockets(Path(folder))
        assert len(sockets) == 1
        Workspace().release()
        assert not sockets[0].exists()
        assert not any(is_alive(int(pid)) for pid in pids)
        assert remains(Path(folder).name, Path(folder)) == []


def remains(name: str, folder: Path) -> list[str]:
    """Return the kernel objects that remain of a node."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{folder}/" in line]
    paths = [folder, NAMESPACES / name, NETWORK_INTERFACES / name, *CONTROL_GROUPS.glob(f"*/{name}")]
    return mounts + [str(path) for path in paths if path.exists()]


class TestRegistry:
    def test_a_pull_shows_its_progress(self, node: DockerNode, registry: Registry) -> None:
        reference = registry.add_image("progress", extra_layers=3, layer_bytes=4 * MEGABYTE)
        lines = list(node.client.api.pull(reference, stream=True, decode=True))
        # Docker shows no "Downloading" for a fast layer, and the base layer may be on the node.
        complete = {"Pull complete", "Already exists"}
        assert len({line["id"] for line in lines if line["status"] in complete}) == 4
        totals = [line["progressDetail"]["total"] for line in lines if line["status"] == "Downloading"]
        assert max(totals) > 4 * MEGABYTE
        assert f"Digest: {registry.digest(reference)}" in [line["status"] for line in lines]
        assert shell(node, reference, "wc -c < /layer-2") == f"{4 * MEGABYTE}\n"

    def test_a_frozen_registry_does_not_answer_until_it_is_thawed(self, registry: Registry) -> None:
        registry.freeze()
        try:
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{registry.url}/v2/", timeout=0.5)
        finally:
            registry.thaw()
        assert httpx.get(f"{registry.url}/v2/", timeout=5).is_success

    def test_a_missing_image_is_not_found(self, node: DockerNode, registry: Registry) -> None:
        with pytest.raises(docker.errors.NotFound):
            node.client.images.pull(f"{registry.name}/absent:1")


def rows(url: str) -> int:
    with psycopg.connect(url) as connection:
        answer = connection.execute("SELECT count(*) FROM moorings").fetchone()
    assert answer is not None
    return int(answer[0])


def fill(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE moorings AS SELECT generate_series(1, 3) AS number")


class TestPostgres:
    def test_databases_are_separate_and_copies_are_complete(self, postgres_cluster: PostgresCluster) -> None:
        filled = postgres_cluster.create_database()
        fill(filled)
        copy, empty = postgres_cluster.create_database(filled), postgres_cluster.create_database()
        assert rows(copy) == 3
        with pytest.raises(psycopg.errors.UndefinedTable):
            rows(empty)
        postgres_cluster.drop_database(copy)
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            rows(copy)

    def test_the_password_is_required(self, postgres_cluster: PostgresCluster) -> None:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(postgres_cluster.url().replace(":testbed@", ":guess@"))

    @pytest.mark.parametrize("durable", [True, False])
    def test_committed_rows_survive_a_killed_server(
        self, new_postgres_cluster: NewPostgresCluster, durable: bool
    ) -> None:
        cluster = new_postgres_cluster(durable=durable)
        url = cluster.create_database()
        fill(url)
        with closing(psycopg.connect(url)) as connection:
            cluster.kill()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError, match="refused"):
            rows(url)
        cluster.start()
        assert rows(url) == 3

    def test_a_stop_keeps_all_data(self, new_postgres_cluster: NewPostgresCluster) -> None:
        cluster = new_postgres_cluster()
        url = cluster.create_database()
        fill(url)
        cluster.stop()
        cluster.start()
        assert rows(url) == 3

    def test_a_frozen_server_does_not_answer_until_it_is_thawed(
        self, new_postgres_cluster: NewPostgresCluster
    ) -> None:
        cluster = new_postgres_cluster(durable=False)
        url = cluster.create_database()
        fill(url)
        cluster.freeze()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(url, connect_timeout=2)
        cluster.thaw()
        assert rows(url) == 3


class TestMissingParts:
    @pytest.fixture
    def without_programs(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(parts, "search_path", lambda: "/nonexistent")
        parts.missing.cache_clear()
        yield
        parts.missing.cache_clear()

    @pytest.mark.usefixtures("without_programs")
    def test_a_missing_part_skips_the_test_outside_ci(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CI", raising=False)
        with pytest.raises(pytest.skip.Exception, match="not installed: gcc"):
            parts.require("compiler")

    @pytest.mark.usefixtures("without_programs")
    def test_a_missing_part_fails_the_test_in_ci(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception, match="not installed: initdb, postgres, setpriv"):
            parts.require("postgres")


class TestWorkspaces:
    def test_two_workspaces_have_different_folders_subnets_and_prefixes(self, workspace: Workspace) -> None:
        other = Workspace()
        try:
            assert other.root != workspace.root
            assert other.subnet != workspace.subnet
            assert other.prefix != workspace.prefix
        finally:
            other.release()
        assert not other.root.exists()
