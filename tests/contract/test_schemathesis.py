"""Schemathesis with all checks and phases, against a service with nodes on PostgreSQL."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.contract.examples import create_examples
from tests.contract.tools import FOLDER, python_tool
from tests.nodes import WireNode, simulated_node
from tests.service import ADMIN_KEY, Client, running, settings_for

# For a longer run with another seed:
# CONTRACT_SECONDS=1800 CONTRACT_SEED=7 make test ARGS=tests/contract/test_schemathesis.py
SECONDS = int(os.environ.get("CONTRACT_SECONDS", "20"))
SEED = os.environ.get("CONTRACT_SEED", "20261121")
NODES = 2


class NodeSupply:
    """A constant number of simulated nodes: uncordons drained ones, and replaces deleted ones."""

    def __init__(self, admin: Client, folder: Path, exits: ExitStack) -> None:
        self._admin, self._folder, self._exits = admin, folder, exits
        self._made = 0
        self.restore()

    def restore(self) -> None:
        nodes = {node["name"]: node for node in self._admin.items("/v1/nodes", limit=200)}
        for node in nodes.values():
            if node["name"].startswith("simulated-") and (node["cordoned"] or node["draining"]):
                self._admin.post(f"/v1/nodes/{node['id']}/uncordon")
        for _ in range(NODES - sum(name.startswith("simulated-") for name in nodes)):
            self._made += 1
            name = f"simulated-{self._made}"
            self._exits.enter_context(simulated_node(self._admin, self._folder / name, name))


@contextmanager
def _served(database_url: str, folder: Path) -> Iterator[tuple[Client, NodeSupply, WireNode]]:
    with ExitStack() as exits:
        service = exits.enter_context(running(settings_for(database_url, folder / "data", rate_limits="off")))
        admin = exits.enter_context(service.client)
        supply = NodeSupply(admin, folder, exits)
        # The tool uses the credential of this node for /agent/v1.
        wire = WireNode(admin, "wire", gpus=0)
        exits.callback(wire.close)
        wire.sync()
        # Without the cordon, the node would get instances and never start them.
        admin.post(f"/v1/nodes/{wire.id}/cordon")
        # Lists must not be empty, so that their links can be followed.
        create_examples(admin, admin.get("/openapi.json").json())
        admin.create(gpus={"count": 1})
        yield admin, supply, wire


# The phases of each run. Those of the first are finite: every limit and wrong type of every field, once.
PHASES = {"examples,coverage": max(120, SECONDS), "fuzzing": SECONDS, "stateful": SECONDS}


# A busy machine may make few requests in that time: then the run is repeated with more.
TIMES = (1, 6)


@pytest.mark.timeout(sum(TIMES) * max(PHASES.values()) + 180)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # it rejects more than SQLite
@pytest.mark.parametrize("phases", PHASES)
def test_schemathesis_finds_nothing(database_url: str, tmp_path: Path, phases: str) -> None:
    for name in ("schemathesis.toml", "schemathesis_hooks.py"):
        shutil.copy(FOLDER / name, tmp_path)
    with _served(database_url, tmp_path) as (admin, supply, wire):
        for times in TIMES:
            output = _run(admin, supply, wire, tmp_path, phases, times * PHASES[phases])
            if (generated := _generated(output)) > 20:
                break
    assert generated > 20, output
    if phases == "stateful":
        assert _count(r"API Links: +(\d+) covered", output) > 0, output


def _run(admin: Client, supply: NodeSupply, wire: WireNode, folder: Path, phases: str, max_s: int) -> str:
    """What the tool prints. It must find nothing."""
    argv = [
        str(python_tool("schemathesis")),
        "run",
        f"{admin.base_url}/openapi.json",
        f"--phases={phases}",
        f"--max-time={max_s}",
        f"--seed={SEED}",
        "--no-color",
    ]
    environment = {
        **os.environ,
        "CONTRACT_URL": str(admin.base_url),
        "CONTRACT_KEY": ADMIN_KEY,
        "CONTRACT_NODE_CREDENTIAL": wire.identity.credential,
        "CONTRACT_KEEP": wire.id,
    }
    log = folder / "schemathesis.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                supply.restore()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()
            process.wait()
    printed = log.read_text()
    assert process.returncode == 0, printed[-12_000:]
    return printed


def _generated(output_text: str) -> int:
    """How many test cases the run had; none if it ended before its first request, on a busy machine."""
    return 0 if "No test cases were generated" in output_text else _count(r"(\d+) generated", output_text)


def _count(pattern: str, output_text: str) -> int:
    """A number from the tool's output, to check that the run has tested something."""
    found = re.search(pattern, output_text)
    assert found is not None, output_text
    return int(found[1])
