"""The short form of `make faults`: its cheapest faults, on two replicas and two nodes."""

from collections.abc import Iterator
from random import Random

import pytest
from docker.types import DeviceRequest

from tests.faults import agents, control_plane, database, engines
from tests.faults.fleet import Fleet
from tests.faults.trial import Fault, Trial, Trials
from tests.testbed import images
from tests.testbed.parts import require
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace

pytestmark = pytest.mark.timeout(600)  # a busy machine starts two servers, two agents and two dockerds

SETTLED_WITHIN_S = 120
SEED = 20260
SHORT = (
    Fault("F2", "kill -9 a replica", control_plane.kill_replicas),
    Fault("F4", "kill -9 an agent", agents.kill_agents),
    Fault("F6", "kill -9 dockerd, with live-restore", engines.kill_dockerd),
    Fault("F10", "kill -9 PostgreSQL", database.kill_postgres),
)


@pytest.fixture(scope="module")
def trials(
    workspace: Workspace, root_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trials]:
    for part in ("postgres", "compiler"):
        require(part)
    folder, rng = tmp_path_factory.mktemp("faults"), Random(SEED)
    fleet = Fleet(workspace, root_address, folder, rng, replicas=2, nodes=2, special=False)
    try:
        made = Trials(fleet, rng, folder / "evidence", per_s=4, settled_within_s=SETTLED_WITHIN_S)
        try:
            made.begin()
            yield made
        finally:
            made.close()
    finally:
        fleet.close()


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: fault.number)
def test_the_invariants_hold_through_a_fault(trials: Trials, fault: Fault) -> None:
    outcome = trials.run(fault)
    assert outcome.problems == [], outcome


def test_a_violation_is_noticed(trials: Trials) -> None:
    """Another program starts a second container with a GPU and the instance of a bystander."""

    def start_a_second_container(trial: Trial) -> None:
        agent = trial.fleet.agents[0]
        first = trial.bystanders.container(agent)
        api = agent.node.client.api
        gpus = DeviceRequest(driver="nvidia", device_ids=list(first.requested), capabilities=[["gpu"]])
        made = api.create_container(
            images.BUSYBOX,
            labels={"mooring.instance": first.instance},
            host_config=api.create_host_config(device_requests=[gpus]),
        )
        api.start(made["Id"])
        try:
            looks = trials.monitor.looks
            wait_until(lambda: trials.monitor.looks >= looks + 3, 60)
        finally:
            api.remove_container(made["Id"], force=True)

    outcome = trials.run(Fault("F0", "a second container", start_a_second_container))
    assert {problem[:2] for problem in outcome.problems} >= {"I1", "I4"}, outcome.problems
