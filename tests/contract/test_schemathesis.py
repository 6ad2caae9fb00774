"""Schemathesis, all of its checks and phases, against a service with nodes, on PostgreSQL."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.contract.examples import made_of_examples
from tests.contract.tools import FOLDER, python_tool
from tests.nodes import WireNode, simulated_node
from tests.service import ADMIN_KEY, Client, running, settings_for

# For a longer run, and another one:
# CONTRACT_SECONDS=1800 CONTRACT_SEED=7 make test ARGS=tests/contract/test_schemathesis.py
SECONDS = int(os.environ.get("CONTRACT_SECONDS", "20"))
SEED = os.environ.get("CONTRACT_SEED", "20261121")
NODES = 2


class MachineRoom:
    """Simulated nodes, of which there are always enough: what the tool drains or deletes is made good."""

    def __init__(self, admin: Client, folder: Path, exits: ExitStack) -> None:
        self._admin, self._folder, self._exits = admin, folder, exits
        self._made = 0
        self.tend()

    def tend(self) -> None:
        nodes = {node["name"]: node for node in self._admin.items("/v1/nodes", limit=200)}
        for node in nodes.values():
            if node["name"].startswith("simulated-") and (node["cordoned"] or node["draining"]):
                self._admin.post(f"/v1/nodes/{node['id']}/uncordon")
        for _ in range(NODES - sum(name.startswith("simulated-") for name in nodes)):
            self._made += 1
            name = f"simulated-{self._made}"
            self._exits.enter_context(simulated_node(self._admin, self._folder / name, name))


@contextmanager
def _served(database_url: str, folder: Path) -> Iterator[tuple[Client, MachineRoom, WireNode]]:
    with ExitStack() as exits:
        service = exits.enter_context(running(settings_for(database_url, folder / "data", rate_limits="off")))
        admin = exits.enter_context(service.client)
        room = MachineRoom(admin, folder, exits)
        # Whose credential the tool speaks to /agent/v1 with.
        wire = WireNode(admin, "wire", gpus=0)
        exits.callback(wire.close)
        wire.sync()
        # It would take instances and do nothing with them.
        admin.post(f"/v1/nodes/{wire.id}/cordon")
        # Lists that show something, so that the links from them lead somewhere.
        made_of_examples(admin, admin.get("/openapi.json").json())
        admin.create(gpus={"count": 1})
        yield admin, room, wire


# The first has an end of its own: every limit and every wrong type of every field, once.
PHASES = {"examples,coverage": max(60, SECONDS), "fuzzing": SECONDS, "stateful": SECONDS}


@pytest.mark.timeout(SECONDS + 180)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # it rejects more than SQLite
@pytest.mark.parametrize("phases", PHASES)
def test_schemathesis_finds_nothing(database_url: str, tmp_path: Path, phases: str) -> None:
    tool = python_tool("schemathesis")
    for name in ("schemathesis.toml", "schemathesis_hooks.py"):
        shutil.copy(FOLDER / name, tmp_path)
    log = tmp_path / "schemathesis.log"
    with _served(database_url, tmp_path) as (admin, room, wire), log.open("wb") as output:
        process = subprocess.Popen(
            [
                tool,
                "run",
                f"{admin.base_url}/openapi.json",
                f"--phases={phases}",
                f"--max-time={PHASES[phases]}",
                f"--seed={SEED}",
                "--no-color",
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                "CONTRACT_URL": str(admin.base_url),
                "CONTRACT_KEY": ADMIN_KEY,
                "CONTRACT_NODE_CREDENTIAL": wire.identity.credential,
                "CONTRACT_KEEP": wire.id,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                room.tend()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    assert process.returncode == 0, said[-12_000:]
    assert _count(r"(\d+) generated", said) > 20, said
    if phases == "stateful":
        assert _count(r"API Links: +(\d+) covered", said) > 0, said


def _count(pattern: str, said: str) -> int:
    """A number that the tool prints: a run that finds nothing since it tries nothing is no good one."""
    found = re.search(pattern, said)
    assert found is not None, said
    return int(found[1])
