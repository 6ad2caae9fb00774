"""`mooring up` and the other commands, run as from a shell."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from typer.testing import CliRunner

from mooring_client.cli.main import app
from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until
from tests.walk.checker import containers_on
from tests.walk.product import MOORING, clean_environment
from tests.walk.up import Up

NO_DOCKER = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def run_in_shell(command: str, **environment: str) -> dict[str, Any]:
    """Run a command of the output, as a user who pastes it. Return the JSON that it prints."""
    shell = {"PATH": os.environ["PATH"], **environment}
    ran = subprocess.run(["bash", "-c", command], env=shell, capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout))


def await_end_of(processes: list[psutil.Process], within_s: float = 10) -> None:
    wait_until(
        lambda: not [each for each in processes if each.is_running() and not _is_zombie(each)], within_s
    )


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_simulated_fleet_survives_a_restart(up: Callable[..., Up]) -> None:
    first = up(MOORING_SIMULATE="2x8xH100")
    key, data = first.key, Path(first.environment["MOORING_DATA_DIR"])
    printed = first.printed()
    assert f"{first.url}/v1" in printed
    assert httpx.get(f"{first.url}/docs").status_code == 200
    assert str(data) in printed
    assert printed.count(key) == 2, "in the banner and in the curl line"

    made = run_in_shell(first.curl)
    with Client(first.url, key) as admin:
        running = admin.wait(made["id"], "running")
        assert running["simulated"]
        nodes = admin.items("/v1/nodes")
        assert [len(node["gpus"]) for node in nodes] == [8, 8]
        assert all(node["simulated"] and node["state"] == "ready" for node in nodes)
        assert all(gpu["simulated"] for gpu in admin.items("/v1/gpus"))
        project = running["project_id"]

        # Ctrl-C, while clients follow logs and events, and wait for a state.
        processes = [psutil.Process(first.pid), *first.children()]
        assert len(processes) > 1
        with _busy_clients(first.url, key, made["id"]):
            began = time.monotonic()
            status = first.stop(signal.SIGINT)
            took_s = time.monotonic() - began
        # The clients would wait for a minute and more.
        assert (status, took_s < 10) == (0, True), f"{status} after {took_s:.1f} s:\n{first.tail()}"
        await_end_of(processes)
        assert "Traceback" not in first.printed()

    second = up(MOORING_SIMULATE="2x8xH100")
    assert key not in second.printed()
    with Client(second.url, key) as admin:
        assert admin.instance(made["id"])["project_id"] == project
        assert {node["id"] for node in admin.items("/v1/nodes")} == {node["id"] for node in nodes}
        again = run_in_shell(second.curl, MOORING_KEY=key)
        assert admin.wait(again["id"], "running")["simulated"]
    assert second.stop(signal.SIGTERM) == 0


def test_the_agents_folder_may_be_lost(up: Callable[..., Up]) -> None:
    first = up(MOORING_SIMULATE="2x1xH100")
    key, data = first.key, Path(first.environment["MOORING_DATA_DIR"])
    with Client(first.url, key) as admin:
        nodes = {node["id"] for node in admin.items("/v1/nodes")}
    assert first.stop() == 0
    shutil.rmtree(data / "agent")
    second = up(MOORING_SIMULATE="2x1xH100")
    with Client(second.url, key) as admin:
        assert {node["id"] for node in admin.items("/v1/nodes")} == nodes
        made = admin.create(gpus={"count": 1})
        admin.wait(made["id"], "running")
    assert second.stop() == 0


class _busy_clients:  # noqa: N801 - used as a function
    """Within the block, clients read endless streams. Its end waits until the server has closed them."""

    def __init__(self, url: str, key: str, instance_id: str) -> None:
        follow = f"/v1/instances/{instance_id}"
        self._calls: list[tuple[str, dict[str, Any], str]] = [
            (f"{follow}/logs", {"follow": True}, "text/event-stream"),
            ("/v1/events", {}, "text/event-stream"),
            (f"{follow}/wait", {"state": "stopped", "timeout_s": 60}, "application/json"),
        ]
        self._client = Client(url, key)
        self._begun = threading.Barrier(len(self._calls) + 1)
        self._threads = [threading.Thread(target=self._read, args=call) for call in self._calls]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._begun.wait(20)

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(20)
        self._client.close()

    def _read(self, path: str, params: dict[str, Any], accept: str) -> None:
        begun = False
        try:
            if accept == "application/json":
                self._begun.wait(20)
                begun = True
            with self._client.stream("GET", path, params=params, headers={"Accept": accept}) as answer:
                if not begun:
                    self._begun.wait(20)
                answer.read()
        except httpx.HTTPError:
            pass  # closed, as expected


def test_the_local_node_gets_no_server_secret(up: Callable[..., Up]) -> None:
    key = "canary-of-the-admin-key-0123456789abcdef"
    running = up(**NO_DOCKER, MOORING_SIMULATE="1x1xH100", MOORING_BOOTSTRAP_ADMIN_KEY=key)
    [agent, *_readers] = running.children()
    assert key not in agent.environ().values()


def test_kill_9_of_the_parent_ends_everything(up: Callable[..., Up], tmp_path: Path) -> None:
    nvml = NvmlStandin(tmp_path, "gpus 2")
    library = {name: nvml.environment[name] for name in ("LD_LIBRARY_PATH", "NVIDIA_NVML_STANDIN")}
    running = up(**NO_DOCKER, **library)
    with Client(running.url, running.key) as admin:
        gpus = wait_until(lambda: admin.items("/v1/gpus"))
        assert [gpu["simulated"] for gpu in gpus] == [False, False]
        [node] = admin.items("/v1/nodes")
        assert node["simulated"], "its containers are simulated"
    assert "containers are SIMULATED" in running.printed()
    children = running.children()
    assert len(children) >= 2, "the agent, and the process that calls NVML"
    running.kill()
    await_end_of(children)


def test_a_wrong_setting_is_reported_before_anything_is_created(tmp_path: Path) -> None:
    """Otherwise the admin key would be created but not shown, and it is shown only once."""
    environment = {"MOORING_DATA_DIR": str(tmp_path / "data"), "MOORING_SIMULATE": "2x8xH1000"}
    ended = CliRunner().invoke(app, ["up"], env=environment)
    assert (ended.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert ended.stderr.startswith("MOORING_SIMULATE: 'H1000' is not a GPU model that can be simulated")


def test_the_admin_key_survives_a_failed_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = clean_environment() | {
            "MOORING_DATA_DIR": str(tmp_path), "MOORING_PORT": str(taken.getsockname()[1]),
            "MOORING_SIMULATE": "1x1xH100",
        }  # fmt: skip
        ended = subprocess.run(
            [*MOORING, "up"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode != 0
    assert "address already in use" in ended.stderr
    assert re.search(r"Admin key +mk_\S+ ", ended.stdout)


def test_an_agent_that_dies_ends_the_parent(up: Callable[..., Up]) -> None:
    running = up(MOORING_SIMULATE="1x1xH100")
    [agent] = running.children()
    agent.kill()
    assert running.wait() != 0
    assert "local node ended" in running.printed()


def test_real_containers_with_simulated_gpus(
    up: Callable[..., Up], docker_nodes: Callable[[int], list[DockerNode]]
) -> None:
    [node] = docker_nodes(1)
    running = up(DOCKER_HOST=node.url)
    assert "GPU" in running.printed()
    assert "SIMULATED" in running.printed()
    with Client(running.url, running.key) as admin:
        made = admin.create(image="mooring-test/cuda-env:1", gpus={"count": 2})
        shown = admin.wait(made["id"], "running")
        # Docker is in another network namespace, as for users without root.
        assert "containers of this node can reach the node itself" in running.printed()
        assert shown["simulated"]
        assert [device["model"] for device in shown["devices"]] == ["NVIDIA H100 80GB HBM3"] * 2
        [container] = containers_on(node)
        assert container.runs
        assert (container.requested, container.visible) == ((), "void")
        ran = admin.post(f"/v1/instances/{made['id']}/exec", json={"command": ["echo", "real"]})
        assert ran.json()["stdout"] == "real\n"
        without = admin.create(cpus=0.1, memory_mib=64)
        assert not admin.wait(without["id"], "running")["simulated"]

        # The containers outlive the process, and the next start adopts them.
        before = containers_on(node)
        assert running.stop(signal.SIGINT) == 0
        assert containers_on(node) == before
        running.start()
        wait_until(
            lambda: admin.post(f"/v1/instances/{made['id']}/exec", json={"command": ["id"]}).is_success, 20
        )
        assert containers_on(node) == before
        for instance in (made, without):
            admin.delete(f"/v1/instances/{instance['id']}")
        wait_until(lambda: not containers_on(node), 20)


def test_a_stopped_docker_is_not_replaced_by_a_simulation(
    up: Callable[..., Up], docker_nodes: Callable[[int], list[DockerNode]]
) -> None:
    [node] = docker_nodes(1)
    running = up(DOCKER_HOST=node.url)
    with Client(running.url, running.key) as admin:
        made = admin.create(gpus={"count": 2})
        admin.wait(made["id"], "running")
        running.stop()
        node.stop()
        try:
            running.start()
            shown = wait_until(lambda: _not_ready(admin), 20)
            assert shown["reason"]["code"] == "docker_unavailable"
            assert admin.instance(made["id"])["state"] == "running"
        finally:
            node.start()
        wait_until(lambda: admin.items("/v1/nodes")[0]["state"] == "ready", 20)
        assert admin.instance(made["id"])["state"] == "running"
        admin.delete(f"/v1/instances/{made['id']}")
        wait_until(lambda: not containers_on(node), 20)


def _not_ready(admin: Client) -> dict[str, Any] | None:
    [node] = admin.items("/v1/nodes")
    return node if node["state"] == "not_ready" else None


# --- the other commands


def mooring(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [*MOORING, *arguments]
    whole = clean_environment() | environment
    return subprocess.run(argv, env=whole, capture_output=True, text=True, check=False, timeout=60)


def test_server_does_not_serve_plain_http_on_public_addresses(tmp_path: Path) -> None:
    ran = mooring("server", MOORING_HOST="0.0.0.0", MOORING_DATA_DIR=str(tmp_path))
    assert ran.returncode == 2
    assert "MOORING_BEHIND_TLS_PROXY" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_db_commands(tmp_path: Path) -> None:
    settings = {"MOORING_DATA_DIR": str(tmp_path)}
    assert "no revision" in mooring("db", "current", **settings).stdout
    upgraded = mooring("db", "upgrade", **settings)
    assert upgraded.returncode == 0
    revision = upgraded.stdout.split()[-1]
    assert mooring("db", "current", **settings).stdout.count(revision) == 2
    downgraded = mooring("db", "downgrade", "base", **settings)
    assert (downgraded.returncode, "no revision" in downgraded.stdout) == (0, True)


def test_doctor_reports_problems(docker_nodes: Callable[[int], list[DockerNode]], tmp_path: Path) -> None:
    [node] = docker_nodes(1)
    # This process is outside the node's network namespace, which has Docker's rules.
    outside = {
        "DOCKER_HOST": node.url,
        "MOORING_NETWORK_ISOLATION": "best_effort",
        "MOORING_ALLOW_UNSAFE_VERSIONS": "true",
    }
    fine = mooring("doctor", PATH=node.environment["PATH"], **outside)
    assert fine.returncode == 0, fine.stdout
    assert re.search(r"^(ok|warn) +network isolation", fine.stdout, re.MULTILINE)
    assert re.search(r"^warn +toolbox +none", fine.stdout, re.MULTILINE)
    assert re.search(r"^warn +docker +runc .* has known container escapes", fine.stdout, re.MULTILINE)
    nvml = NvmlStandin(tmp_path, "gpus 2")
    library = {name: nvml.environment[name] for name in ("LD_LIBRARY_PATH", "NVIDIA_NVML_STANDIN")}
    broken = mooring("doctor", **NO_DOCKER, **library)
    assert broken.returncode == 1
    assert re.search(r"^FAIL +docker +", broken.stdout, re.MULTILINE)
    assert "2 GPUs" in broken.stdout


def test_a_changed_simulated_fleet_needs_no_approval(up: Callable[..., Up], tmp_path: Path) -> None:
    """The operator's own process simulates the local nodes."""
    first = up(MOORING_SIMULATE="1x2xH100", **NO_DOCKER)
    key = first.key
    first.stop()
    second = up(MOORING_SIMULATE="1x4xB200", **NO_DOCKER)
    with Client(second.url, key) as admin:

        def models() -> tuple[str, list[str]]:
            (node,) = admin.items("/v1/nodes")
            return node["state"], [gpu["model"] for gpu in node["gpus"]]

        wait_until(lambda: models()[0] == "ready" and len(models()[1]) == 4)
        assert all("B200" in model for model in models()[1])
