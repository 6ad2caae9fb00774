"""The agent's process: joining, simulated fleets, and exit codes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from mooring.agent.main import address_towards
from mooring.agent.settings import AgentSettings, dns_label
from mooring.core.simulation import SimulatedFleet
from tests.agent.builders import assignment
from tests.agent.control_planes import TOKEN, TinyControlPlane, control_plane
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until

PROGRAM = """
import sys
from mooring.agent.main import run
from mooring.agent.settings import AgentSettings
sys.exit(run(AgentSettings(), parent_fd=int(sys.argv[1]) if len(sys.argv) > 1 else None))
"""


@pytest.fixture
def server() -> Iterator[TinyControlPlane]:
    with control_plane() as made:
        yield made


@contextmanager
def agent(
    server: TinyControlPlane, data_dir: Path, parent_fd: int | None = None, /, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    settings = {
        "SERVER_URL": server.url,
        "DATA_DIR": str(data_dir),
        "JOIN_TOKEN": TOKEN,
        "SIMULATE": "1x2xT4",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *([str(parent_fd)] if parent_fd is not None else [])],
        env={
            **os.environ,
            **{f"MOORING_{name}": value for name, value in {**settings, **environment}.items()},
        },
        pass_fds=[parent_fd] if parent_fd is not None else [],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], within_s: float = 60) -> tuple[int, str]:
    """Wait for the end of the process. Returns its exit code and what it logged."""
    _, logged = process.communicate(timeout=within_s)
    return process.returncode, logged


def test_an_agent_joins_and_runs_its_assignments(server: TinyControlPlane, tmp_path: Path) -> None:
    instance = assignment()
    server.wants(instance)
    server.report_interval_s = 30
    with agent(server, tmp_path) as process:
        wait_until(lambda: server.phase(instance) == "running", timeout_s=20)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, logged = ended(process)
        assert time.monotonic() - began < 8  # without waiting for its next report
    assert code == 0
    assert "joined" in logged and TOKEN not in logged and "canary" not in logged
    report = server.last()
    assert report is not None and report.gpus is not None
    assert [gpu.model for gpu in report.gpus] == ["Tesla T4", "Tesla T4"]


def test_a_restarted_agent_does_not_join_again(server: TinyControlPlane, tmp_path: Path) -> None:
    for session in (1, 2):
        with agent(server, tmp_path, JOIN_TOKEN=TOKEN if session == 1 else "") as process:
            wait_until(lambda: server.sessions == session and server.reports, timeout_s=20)  # noqa: B023
            process.send_signal(signal.SIGINT)
            assert ended(process)[0] == 0


def test_a_signal_that_interrupts_the_wait_for_the_end_does_not_deadlock() -> None:
    """The handler runs in the main thread, here while that thread holds the lock of the event."""
    program = """
import signal, threading
from mooring.agent import main
stopping = threading.Event()
main._stop_on_signals(stopping, None)
with stopping._cond:
    signal.raise_signal(signal.SIGTERM)
raise SystemExit(0 if stopping.wait(10) else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0


def test_a_signal_ends_the_wait_of_a_main_thread_that_does_not_run() -> None:
    """As a signal that arrives just before the main thread blocks. Here another thread receives it."""
    program = """
import signal, threading
from mooring.agent import main
stopping, blocked = threading.Event(), threading.Event()
main._stop_on_signals(stopping, None)
def send():
    blocked.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=send).start()
threading.Timer(0.5, blocked.set).start()
raise SystemExit(0 if stopping.wait(10) else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0


def test_an_unreachable_control_plane_is_logged_once(server: TinyControlPlane, tmp_path: Path) -> None:
    server.failure = (503, "database_unavailable")
    with agent(server, tmp_path) as process:
        wait_until(lambda: server.calls >= 4, timeout_s=20)
        server.failure = None
        wait_until(lambda: server.reports, timeout_s=20)
        process.send_signal(signal.SIGTERM)
        code, logged = ended(process)
    assert code == 0
    assert logged.count("cannot reach the control plane") == 1
    assert logged.count("the control plane is reachable again") == 1


def test_a_simulated_fleet_is_one_process(server: TinyControlPlane, tmp_path: Path) -> None:
    with agent(server, tmp_path, SIMULATE="2x8xH100,1x1xL4", NODE_NAME="fleet"):
        wait_until(lambda: len({one.facts.hostname for _, one in server.reports}) == 3, timeout_s=20)
    assert {one.facts.hostname for _, one in server.reports} == {"fleet-1", "fleet-2", "fleet-3"}


def test_an_agent_ends_with_its_parent(server: TinyControlPlane, tmp_path: Path) -> None:
    read, write = os.pipe()
    with agent(server, tmp_path, read) as process:
        os.close(read)
        wait_until(lambda: server.reports, timeout_s=20)
        os.close(write)
        code, logged = ended(process)
    assert (code, "the parent process is gone" in logged) == (0, True)


@pytest.mark.parametrize(
    ("environment", "code", "words"),
    [
        ({"JOIN_TOKEN": ""}, 2, "set MOORING_JOIN_TOKEN"),
        ({"JOIN_TOKEN": "guessed"}, 4, "each works once"),
        ({"SERVER_URL": "http://10.255.255.1:8700"}, 2, "unencrypted"),
    ],
)
def test_startup_errors_are_logged(
    server: TinyControlPlane, tmp_path: Path, environment: dict[str, str], code: int, words: str
) -> None:
    with agent(server, tmp_path, **environment) as process:
        ended_with, logged = ended(process)
    assert (ended_with, words in logged) == (code, True)


def test_a_directory_has_one_agent(server: TinyControlPlane, tmp_path: Path) -> None:
    with agent(server, tmp_path):
        wait_until(lambda: server.reports, timeout_s=20)
        with agent(server, tmp_path) as second:
            code, logged = ended(second)
    assert (code, "another agent runs in" in logged) == (2, True)


@pytest.mark.skipif(not Path("/etc/machine-id").exists(), reason="this machine has no id")
def test_an_agent_does_not_start_with_the_directory_of_another_machine(
    server: TinyControlPlane, tmp_path: Path
) -> None:
    with agent(server, tmp_path):
        wait_until(lambda: server.reports, timeout_s=20)
    (path,) = tmp_path.rglob("machine")
    path.write_text("another")
    server.reports.clear()
    with agent(server, tmp_path) as copied:
        code, logged = ended(copied)
    assert (code, "belongs to another machine" in logged, server.reports) == (2, True, [])


def test_an_agent_ends_when_another_takes_over(server: TinyControlPlane, tmp_path: Path) -> None:
    with agent(server, tmp_path) as process:
        wait_until(lambda: server.reports, timeout_s=20)
        server.failure = (409, "stale_session")
        code, logged = ended(process)
    assert (code, "has taken over" in logged) == (3, True)


def _toolkit(folder: Path, version: str) -> None:
    program = folder / "nvidia-ctk"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA Container Toolkit CLI version {version}'\n")
    program.chmod(0o755)


@pytest.fixture
def real_parts(monkeypatch: pytest.MonkeyPatch, docker_node: DockerNode, nvml: NvmlStandin) -> None:
    """Lets agents that the test starts find Docker and a GPU on this machine."""
    monkeypatch.setenv("DOCKER_HOST", docker_node.url)
    for name in ("LD_LIBRARY_PATH", "NVIDIA_NVML_STANDIN"):
        monkeypatch.setenv(name, nvml.environment[name])
    monkeypatch.setenv("MOORING_NETWORK_ISOLATION", "best_effort")


def _problems(server: TinyControlPlane) -> set[str | None]:
    return {report.problem.code if report.problem else None for _at, report in server.reports}


@pytest.mark.usefixtures("real_parts")
def test_a_vulnerable_toolkit_is_a_problem_of_the_node(
    server: TinyControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _toolkit(tmp_path, "1.17.8")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with agent(server, tmp_path, SIMULATE="", ALLOW_UNSAFE_VERSIONS="true"):
        wait_until(lambda: "toolkit_too_old" in _problems(server), timeout_s=30)


@pytest.mark.usefixtures("real_parts")
def test_a_vulnerable_engine_is_a_problem_of_the_node(server: TinyControlPlane, tmp_path: Path) -> None:
    """The test bed uses Debian's Docker, whose runc is vulnerable."""
    with agent(server, tmp_path, SIMULATE=""):
        wait_until(lambda: "engine_too_old" in _problems(server), timeout_s=30)


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORING_NODE_LABELS", "zone=a, rack=3")
    monkeypatch.setenv("MOORING_SIMULATE", "2x8xh100")
    monkeypatch.setenv("MOORING_NODE_NAME", "")
    settings = AgentSettings()
    assert settings.node_labels == {"zone": "a", "rack": "3"}
    assert settings.simulate == (SimulatedFleet(2, 8, "H100"),)
    assert settings.node_name is None
    assert (settings.network_isolation, settings.runtime) == ("required", "runc")
    assert settings.management_addresses is None


@pytest.mark.parametrize(
    ("given", "read"),
    [("none", []), ("10.0.0.0/8, 192.0.2.7,fd12::/16", ["10.0.0.0/8", "192.0.2.7/32", "fd12::/16"])],
)
def test_management_addresses(monkeypatch: pytest.MonkeyPatch, given: str, read: list[str]) -> None:
    monkeypatch.setenv("MOORING_MANAGEMENT_ADDRESSES", given)
    addresses = AgentSettings().management_addresses
    assert addresses is not None
    assert [str(network) for network in addresses] == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NODE_LABELS", "zone"),
        ("NODE_LABELS", "-=a"),
        ("SIMULATE", "8"),
        ("NODE_NAME", "GPU 1"),
        ("MANAGEMENT_ADDRESSES", "10.0.0.1/8"),
        ("MANAGEMENT_ADDRESSES", "mooring.example"),
        ("NETWORK_ISOLATION", "off"),
        ("RUNTIME", "--privileged"),
        ("RUNTIME", "nvidia"),
    ],
)
def test_invalid_settings_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MOORING_{name}", value)
    with pytest.raises(ValidationError):
        AgentSettings()


@pytest.mark.parametrize(
    ("hostname", "label"),
    [("gpu-7.example.com", "gpu-7"), ("GPU_7", "gpu-7"), ("-", "node"), ("a" * 70, "a" * 63)],
)
def test_a_hostname_becomes_a_node_name(hostname: str, label: str) -> None:
    assert dns_label(hostname) == label


def test_the_nodes_address_is_the_one_on_the_route_to_the_server() -> None:
    assert address_towards("http://127.0.0.1:8700") == "127.0.0.1"
    assert address_towards("https://no-such-host.invalid") == "127.0.0.1"
