"""A thread that dies ends its process; a full disk does not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import join_token
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.filesystems import fill, small_file_system
from tests.testbed.waiting import wait_until
from tests.walk.product import Program, clean_environment

# Replaces a function before the command runs.
FAILING = """
import sys
from {module} import {name}
def fail(*_arguments):
    raise RuntimeError("an unexpected exception")
{name}.{function} = fail
from mooring_client.cli.main import app
app([{command!r}])
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    with running(settings_for(url, tmp_path / "server", report_interval_s=0.3)) as made:
        yield made


@pytest.fixture
def admin(service: RunningService) -> Iterator[Client]:
    with service.client as client:
        yield client


def agent_environment(admin: Client, folder: Path) -> dict[str, str]:
    return clean_environment() | {
        "MOORING_DATA_DIR": str(folder),
        "MOORING_SERVER_URL": str(admin.base_url),
        "MOORING_SIMULATE": "1x1xH100",
        "MOORING_JOIN_TOKEN": join_token(admin),
    }


@pytest.mark.parametrize(
    ("module", "name", "function"),
    [
        ("mooring.agent.sync.exchange", "Exchange", "_wait_until_due"),
        ("mooring.agent.sync.exchange", "Exchange", "_call_and_pause"),
        ("mooring.agent.sync.agent", "Agent", "_idle_s"),
        ("mooring.agent.streams.requests", "StreamRequestsCall", "_run"),
    ],
)
def test_an_agent_ends_with_each_of_its_threads(
    admin: Client, tmp_path: Path, module: str, name: str, function: str
) -> None:
    script = FAILING.format(module=module, name=name, function=function, command="agent")
    status, printed = run(script, agent_environment(admin, tmp_path / "node"))
    assert status == 1, printed
    assert "CRITICAL" in printed and "RuntimeError: an unexpected exception" in printed


def test_a_server_ends_with_each_of_its_loops(tmp_path: Path) -> None:
    script = FAILING.format(
        module="mooring.loops.scheduling", name="Scheduling", function="_ticked", command="server"
    )
    environment = {"MOORING_DATA_DIR": str(tmp_path), "MOORING_PORT": "0"}
    status, printed = run(script, clean_environment() | environment)
    assert status == 1, printed
    assert "thread Scheduling failed; this process ends" in printed


def run(script: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a script until it ends. Returns its exit status and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_an_agent_with_a_full_disk_renews_its_credential_later(admin: Client, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 1) as disk:
        agent = Program(["agent"], agent_environment(admin, disk / "node"), tmp_path / "agent.log")
        agent.start()
        try:
            (node,) = wait_until(lambda: admin.items("/v1/nodes"))
            path = f"/v1/nodes/{node['id']}"
            wait_until(lambda: admin.get(path).json()["state"] == "ready", 20)
            before = (disk / "node" / "agent" / "sim-1" / "node.json").read_bytes()
            fill(disk / "filling")
            assert admin.post(f"{path}/renew-credential").status_code in {200, 202}
            wait_until(lambda: "cannot renew the credential" in agent.printed(), 20)
            last = admin.get(path).json()["last_heartbeat_at"]
            wait_until(lambda: admin.get(path).json()["last_heartbeat_at"] > last, 20)
            (disk / "filling").unlink()
            wait_until(lambda: (disk / "node" / "agent" / "sim-1" / "node.json").read_bytes() != before, 20)
            wait_until(lambda: admin.get(path).json()["state"] == "ready", 20)
            made = admin.create(gpus={"count": 1})
            admin.wait(made["id"], "running")
            assert agent.running
        finally:
            agent.stop()
