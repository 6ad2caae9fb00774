"""SkyPilot's own code, unmodified, launches on a server that `mooring compat skypilot` has set it up for."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring_client import Mooring
from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, RunningService, running, settings_for
from tests.test_readme import running_gateway
from tests.testbed.parts import skip
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.cli_client import CliClient
from tests.walk.product import clean_environment

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "tests" / "skypilot" / ".venv"
CLUSTER = "sky-c-1"


class SkyPilot:
    """Runs steps of `tests/skypilot/drive.py` in a home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._environment = clean_environment() | {
            "HOME": str(home),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_DEBUG": "0",
        }

    def __call__(self, *steps: str, cluster: str = CLUSTER) -> list[Any]:
        """What each step returned, or `ERROR: MESSAGE`."""
        driver = ROOT / "tests" / "skypilot" / "drive.py"
        argv = [str(ENVIRONMENT / "bin" / "python"), str(driver), cluster]
        done = subprocess.run(
            [*argv, *steps],
            env=self._environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
        assert len(found) == len(steps), done.stdout + done.stderr
        return [
            each["returned"] if "returned" in each else f"{each['raised']}: {each['message']}"
            for each in found
        ]


@pytest.fixture(scope="module")
def sky_service(tmp_path_factory: pytest.TempPathFactory, workspace: Workspace) -> Iterator[RunningService]:
    """A service with a gateway and a node of four H100 GPUs."""
    folder: Path = tmp_path_factory.mktemp("skypilot")
    ports = [workspace.take_port() for _ in range(2)]
    settings = settings_for(
        f"sqlite:///{folder / 'mooring.db'}", folder / "data",
        skypilot_image="mooring-test/skypilot-ready:1", ssh_port=ports[1], proxy_port=0,
    )  # fmt: skip
    with (
        running(settings) as service,
        service.client as admin,
        simulated_node(admin, folder / "node", "gpu-1", gpus=4),
        running_gateway(settings, ports[0], folder),
    ):
        wait_until(lambda: admin.items("/v1/gpus") != [])
        yield service
    for port in ports:
        workspace.give_back_port(port)


@pytest.fixture
def mooring(sky_service: RunningService) -> Iterator[Mooring]:
    with Mooring(sky_service.url, ADMIN_KEY) as client:
        yield client
        for instance in client.instances.list():
            client.instances.delete(instance.id)
            client.instances.wait(instance.id, "deleted", timeout_s=20)


@pytest.fixture
def sky(sky_service: RunningService, mooring: Mooring, tmp_path: Path) -> SkyPilot:
    """SkyPilot as `mooring compat skypilot` configures it."""
    if not (ENVIRONMENT / ".installed").exists():
        skip("SkyPilot: not installed; run tests/testbed/install.sh")
    cli = CliClient(sky_service.url, tmp_path)
    done = cli.run("compat", "skypilot")  # HOME is the folder
    assert done.returncode == 0, done.stderr
    return SkyPilot(tmp_path)


@pytest.fixture
def of_two_gpus(sky: SkyPilot) -> str:
    """The instance type with two GPUs."""
    types = (sky.home / ".sky/catalogs/v8/primeintellect/vms.csv").read_text()
    (found,) = (line for line in types.splitlines() if "2xH100" in line)
    return found.split(",")[0]


def test_a_cluster_is_launched_used_and_terminated(sky: SkyPilot, mooring: Mooring, of_two_gpus: str) -> None:
    public_key, record, states, info, (code, output, _errors), nothing, after = sky(
        "authenticate", f"launch={of_two_gpus}", "query", "info", "run=echo hello", "down", "query"
    )
    assert public_key.startswith(str(sky.home))
    pod_id = record["head_instance_id"]
    assert (record["created_instance_ids"], record["zone"]) == ([pod_id], "z1")
    assert states == {pod_id: "UP"}
    ssh = mooring.service.ssh()
    assert info == {"user": pod_id, "ip": ssh.host, "port": ssh.port}
    assert code == 0
    assert output.startswith("simulated: /bin/bash --login -c ")  # a simulated container shows the command
    assert "(echo hello)" in output
    assert (nothing, after) == (None, {})
    assert [instance.id for instance in mooring.instances.list()] == []


def test_a_launch_of_a_cluster_that_is_up_makes_no_second_pod(
    sky: SkyPilot, mooring: Mooring, of_two_gpus: str
) -> None:
    first, second = sky(f"launch={of_two_gpus}", f"launch={of_two_gpus}")
    assert second["created_instance_ids"] == []
    assert second["head_instance_id"] == first["head_instance_id"]
    (instance,) = mooring.instances.list()
    assert (instance.name, instance.gpus.count) == (f"{CLUSTER}-head", 2)


def test_a_launch_that_does_not_fit_lets_skypilot_try_elsewhere(sky: SkyPilot, of_two_gpus: str) -> None:
    launch = f"launch={of_two_gpus}"
    sky(launch, cluster="sky-a")
    sky(launch, cluster="sky-b")
    refused, states = sky(launch, "query")
    assert refused.startswith("ResourcesUnavailableError: Resources are currently unavailable")
    assert "insufficient capacity: no node can host this now" in refused
    assert states == {}


def test_a_head_that_failed_is_replaced(sky: SkyPilot, mooring: Mooring, of_two_gpus: str) -> None:
    (record,) = sky(f"launch={of_two_gpus}")
    mooring.instances.stop(record["head_instance_id"])
    mooring.instances.wait(record["head_instance_id"], "stopped", timeout_s=20)
    states, again, _nothing, after = sky("query", f"launch={of_two_gpus}", "down", "query")
    assert states == {record["head_instance_id"]: "STOPPED"}
    assert again["created_instance_ids"] == [again["head_instance_id"]] != [record["head_instance_id"]]
    assert after == {}


def test_a_wrong_key_is_noticed(sky: SkyPilot, of_two_gpus: str) -> None:
    (right,) = sky("check")
    assert right[0] is True
    config = sky.home / ".prime/config.json"
    wrong = json.loads(config.read_text()) | {"api_key": "mk_wrong-key-of-the-usual-length-0123456789"}
    config.write_text(json.dumps(wrong))
    checked, launched = sky("check", f"launch={of_two_gpus}")
    assert (checked[0], "check that your API key" in checked[1]) == (False, True)
    assert launched.startswith("PrimeintellectAPIError: API request failed: ")


def test_the_catalog_is_what_skypilot_considers(sky: SkyPilot, of_two_gpus: str) -> None:
    two, eight, cpus, offers, size = sky(
        "feasible=H100:2", "feasible=H100:8", "feasible", "offers=H100", f"size={of_two_gpus}"
    )
    assert two == [of_two_gpus]
    assert eight == []
    assert cpus == ["mooring__CPU_NODE__2__8"]
    assert [offer[:2] for offer in offers] == [[1.0, "lab"], [2.0, "lab"], [4.0, "lab"]]
    assert size == [48.0, 486.0]
