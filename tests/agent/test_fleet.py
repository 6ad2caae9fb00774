"""Many simulated nodes in one process, with a real control plane."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.nodes import join_token
from tests.service import Client, running, settings_for
from tests.testbed.waiting import wait_until
from tests.walk.product import Program, clean_environment

LIMITED = """
import resource, sys
from mooring.agent.fleet import TooFewFiles, allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])))
try:
    allow_connections(int(sys.argv[2]))
except TooFewFiles as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Client]:
    settings = settings_for(
        f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "server", report_interval_s=0.5
    )
    with running(settings) as service, service.client as client:
        yield client


@contextmanager
def fleet(admin: Client, folder: Path, nodes: int) -> Iterator[Program]:
    """An agent process with simulated nodes of one GPU, all ready."""
    environment = clean_environment() | {
        "MOORING_DATA_DIR": str(folder),
        "MOORING_SERVER_URL": str(admin.base_url),
        "MOORING_SIMULATE": f"{nodes}x1xT4",
        "MOORING_JOIN_TOKEN": ",".join(join_token(admin) for _ in range(nodes)),
    }
    program = Program(["agent"], environment, folder.with_suffix(".log"))
    program.start()
    try:
        wait_until(lambda: len(ready(admin)) == nodes, 120)
        yield program
    finally:
        program.stop()


def ready(admin: Client) -> set[str]:
    return {node["name"] for node in admin.items("/v1/nodes", limit=200) if node["state"] == "ready"}


def seen(admin: Client, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These instances as they are now, without those that are gone."""
    ids = {one["id"] for one in made}
    return [one for one in admin.items("/v1/instances", limit=200) if one["id"] in ids]


def running_on(admin: Client, made: list[dict[str, Any]]) -> set[str]:
    """The names of the nodes on which one of these instances runs."""
    return {one["node_name"] for one in seen(admin, made) if one["state"] == "running"}


def states(admin: Client, made: list[dict[str, Any]]) -> set[str]:
    return {one["state"] for one in seen(admin, made)}


@pytest.mark.timeout(300)  # each wait has its own limit
def test_simulated_nodes_share_a_few_threads(admin: Client, tmp_path: Path) -> None:
    with fleet(admin, tmp_path / "fleet", 40) as program:
        made = [admin.create(command=["sleep", "1000"], gpus={"count": 1}) for _ in range(40)]
        wait_until(lambda: states(admin, made) == {"running"}, 60)
        assert psutil.Process(program.pid).num_threads() < 100
        instance = f"/v1/instances/{made[0]['id']}"
        assert admin.post(f"{instance}/exec", json={"command": ["echo", "hi"]}).json()["stdout"] == "hi\n"
        for one in made:
            admin.delete(f"/v1/instances/{one['id']}")
        wait_until(lambda: not states(admin, made), 60)
        assert psutil.Process(program.pid).num_threads() < 100


@pytest.mark.timeout(300)
def test_a_node_that_cannot_write_its_files_leaves_the_others_alone(admin: Client, tmp_path: Path) -> None:
    with fleet(admin, tmp_path / "fleet", 3) as program:
        directory = tmp_path / "fleet" / "agent" / "sim-2"
        shutil.move(directory, tmp_path / "taken")
        made = [admin.create(command=["sleep", "1000"], gpus={"count": 1}) for _ in range(3)]
        # The third is placed on sim-2, unless sim-2 has already reported that it cannot write.
        wait_until(lambda: ready(admin) == {"sim-1", "sim-3"}, 30)
        wait_until(lambda: running_on(admin, made) >= {"sim-1", "sim-3"}, 30)
        shutil.move(tmp_path / "taken", directory)
        wait_until(lambda: len(ready(admin)) == 3, 30)
        wait_until(lambda: running_on(admin, made) == {"sim-1", "sim-2", "sim-3"}, 60)
        assert program.running


@pytest.mark.parametrize(
    ("may_open", "nodes", "printed"),
    [(5000, 200, "856"), (5000, 10, "300"), (800, 200, "200 simulated nodes need 856 open files")],
)
def test_a_fleet_may_open_a_file_for_each_connection(may_open: int, nodes: int, printed: str) -> None:
    """The limit is raised if that is allowed; otherwise the agent says what it needs."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(may_open), str(nodes)],
        env=dict(os.environ), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(printed)


def test_a_fleet_that_needs_more_files_does_not_start(tmp_path: Path) -> None:
    environment = clean_environment() | {"MOORING_DATA_DIR": str(tmp_path), "MOORING_SIMULATE": "200x1xT4"}
    command = f"ulimit -n 400; exec {sys.executable} -m mooring.cli agent"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "200 simulated nodes need 856 open files, and this process may open 400" in done.stderr
