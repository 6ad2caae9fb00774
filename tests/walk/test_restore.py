"""The procedure of docs/operating.md, "Backup and restore", as an operator pastes it, on both databases."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooring.db import migrate
from tests.nodes import join_token
from tests.service import ADMIN_KEY, Client
from tests.testbed.filesystems import fill, small_file_system
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import MOORING, Program, clean_environment

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
# What systemd does with the unit `mooring`.
SYSTEMCTL = """#!/bin/bash
set -eu
[ "$2" = mooring ]
case "$1" in
    start) setsid mooring server >> server.log 2>&1 < /dev/null & echo $! > server.pid ;;
    stop) kill "$(cat server.pid)" || true
          while [ -e "/proc/$(cat server.pid)/cwd" ]; do read -rt 0.05 <> <(:) || true; done ;;
esac
"""


def documented(first: str) -> str:
    """The block of commands that begins with this one."""
    section = OPERATING.read_text().split("\n## Backup and restore\n")[1]
    found = re.search(rf"```bash\n({re.escape(first)}.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@dataclass
class Machine:
    """A machine with a server. Its shell runs in `folder`, with the server's settings."""

    folder: Path
    environment: dict[str, str]
    url: str

    def run(self, commands: str, *, status: int = 0) -> str:
        """Run commands in a shell. Returns what they print."""
        done = subprocess.run(
            ["bash", "-euc", commands],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def await_ready(self) -> None:
        wait_until(self._is_ready, 30)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def admin(self) -> Client:
        return Client(self.url)

    def kill(self) -> None:
        """Kill the server, as a power failure would."""
        self.run("kill -9 $(cat server.pid)")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[Machine], Program]]:
    """Starts an agent that simulates the node `sim-1`."""
    started: list[Program] = []

    def start(machine: Machine) -> Program:
        with machine.admin as admin:
            settings = {
                "MOORING_DATA_DIR": str(tmp_path / "node"),
                "MOORING_SERVER_URL": machine.url,
                "MOORING_SIMULATE": "1x8xH100",
                "MOORING_JOIN_TOKEN": join_token(admin),
            }
        program = Program(["agent"], clean_environment() | settings, tmp_path / "agent.log")
        started.append(program)
        program.start()
        return program

    yield start
    for program in started:
        program.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def machine(request: pytest.FixtureRequest, workspace: Workspace, tmp_path: Path) -> Iterator[Machine]:
    folder, port = tmp_path / "server", workspace.take_port()
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name, script in {
        "mooring": f'#!/bin/sh\nexec {sys.executable} -m mooring.cli "$@"\n',
        "systemctl": SYSTEMCTL,
    }.items():
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    environment = {
        **clean_environment(),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MOORING_DATA_DIR": str(folder / "data"),
        "MOORING_PORT": str(port),
        "MOORING_BOOTSTRAP_ADMIN_KEY": ADMIN_KEY,
        "MOORING_REPORT_INTERVAL_S": "1",
    }
    if request.param == "postgresql":
        cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
        environment["MOORING_DATABASE_URL"] = cluster.create_database()
    made = Machine(folder, environment, f"http://127.0.0.1:{port}")
    made.run("systemctl start mooring")
    try:
        made.await_ready()
        yield made
    finally:
        made.run("systemctl stop mooring")
        workspace.give_back_port(port)
        if request.param == "postgresql":
            cluster.drop_database(environment["MOORING_DATABASE_URL"])


def test_a_killed_server_is_restored_as_documented(
    machine: Machine, agent: Callable[[Machine], Program]
) -> None:
    agent(machine)
    is_sqlite = "MOORING_DATABASE_URL" not in machine.environment
    with machine.admin as admin:
        before = admin.create(gpus={"count": 1}, name="before")
        admin.wait(before["id"], "running")
        said = machine.run(documented("mooring db backup"))
        assert "checked" in said and "Not in it" in said
        at_backup = admin.items("/v1/events", limit=200)[-1]["seq"]
        after = admin.create(gpus={"count": 2}, name="after")
        admin.wait(after["id"], "running")
        for number in range(20):  # a write-ahead log that a restore must not replay
            admin.create(gpus={"count": 8}, name=f"later-{number}")
        seen = admin.items("/v1/events", limit=200)[-1]["seq"]
        # With a running server, nothing is replaced.
        assert "in use" in machine.run("mooring db restore mooring.backup", status=1)
        machine.kill()

        said = machine.run(documented("systemctl stop mooring"))
        assert "is restored from mooring.backup" in said
        machine.await_ready()

        assert [each["name"] for each in admin.items("/v1/instances")] == ["before"]
        assert admin.get(f"/v1/instances/{after['id']}").status_code == 404
        # The node is ahead: nothing on it changes, and what the database does not know is listed.
        node = wait_until(lambda: _not_ready(admin), 20)
        assert node["reason"]["code"] == "generation_regressed"
        assert [each["instance_id"] for each in node["orphans"]] == [after["id"]]
        assert admin.instance(before["id"])["state"] == "running"
        # Readers that have seen a lost event are told, also when new ones have followed.
        last = admin.items("/v1/events", limit=200)[-1]["seq"]
        assert last > seen
        gone = admin.get("/v1/events", params={"after": seen})
        assert (gone.status_code, gone.json()["code"]) == (410, "events_expired")
        assert admin.items("/v1/events", after=at_backup)[0]["seq"] > seen
    if is_sqlite:
        (old,) = (machine.folder / "data").glob("mooring.db.replaced-*")
        assert (old / "mooring.db").exists() and (old / "mooring.db-wal").stat().st_size > 100_000


def _not_ready(admin: Client) -> dict[str, Any] | None:
    (node,) = admin.items("/v1/nodes")
    detail: dict[str, Any] = admin.get(f"/v1/nodes/{node['id']}").json()
    return detail if detail["state"] == "not_ready" and detail["orphans"] else None


def test_a_server_does_not_start_with_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "mooring.db"
    migrate.upgrade(f"sqlite:///{path}")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(os.urandom(path.stat().st_size // 2))
    status, printed = _start(tmp_path)
    assert (status, printed.count("\n")) == (6, 1), printed
    assert f"{path} is damaged: " in printed and "docs/operating.md" in printed


def test_a_server_on_a_full_disk_says_so(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 1) as disk:
        fill(disk / "filling")
        status, printed = _start(disk / "data")
    assert (status, printed.count("\n")) == (1, 1), printed
    assert re.search("disk is full|No space left on device", printed)


def test_a_server_on_a_read_only_disk_says_so(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 20) as disk:
        migrate.upgrade(f"sqlite:///{disk / 'mooring.db'}")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        status, printed = _start(disk)
    assert (status, printed.count("\n")) == (1, 1), printed
    assert "Read-only file system" in printed


def _start(folder: Path) -> tuple[int, str]:
    """Start a server. Returns the exit status and what it prints."""
    done = subprocess.run(
        [*MOORING, "server"],
        env=clean_environment() | {"MOORING_DATA_DIR": str(folder), "MOORING_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
