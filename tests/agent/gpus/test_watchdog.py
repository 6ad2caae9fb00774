"""A container that exceeds its share of a GPU, or loses its MIG device, is killed; its neighbours are not."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.device_claims import Share
from mooring.agent.decide.reconcile import Kill, Release
from mooring.agent.decide.snapshot import Key
from mooring.agent.gpus.processes import ProcessContainers
from mooring.agent.gpus.reader import NvmlGpuReader, Pace
from mooring.agent.gpus.watchdog import ShareUsage, count_strikes, missing_devices, share_usages
from mooring.agent.nvml.types import NvmlSample
from mooring.agent.runtime import Container
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome
from mooring.core.instance.state import Phase
from mooring.schemas.agent import Assignment, SyncAnswer
from mooring_client.schemas.states import Reason
from tests.agent import builders, docker_assignments
from tests.agent.agents import agent_with
from tests.agent.builders import container, exited, wanted
from tests.agent.control_planes import TinyControlPlane
from tests.agent.grants import GPU, MIG_A, MIG_B, with_gpus, with_mig, with_share
from tests.agent.nvml_children import SELDOM
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

A: Key = ("a", 1)
B: Key = ("b", 1)
SHARE = Share("shared", 250, 20_000, "prj_1")
CONTAINER_OF_PID = {1: "c-a-1", 2: "c-a-1", 3: "c-b-1", 4: None}


def sample(*processes: tuple[int, int | None], uuid: str = GPU, has_list: bool = True) -> NvmlSample:
    """Return the part of a sample that the watchdog reads. `processes`: pids and their memory."""
    listed: Any = [
        {"pid": pid, "name": None, "memory_used_mib": mib, "mig_uuid": None} for pid, mib in processes
    ]
    return {"uuid": uuid, "processes": listed if has_list else None}  # type: ignore[typeddict-item]


def sharing(instance_id: str, **more: Any) -> Container:
    return container(instance_id, gpu_uuids=(GPU,), share=SHARE, **more)


# --- memory in use


@pytest.mark.parametrize(
    ("samples", "used"),
    [
        ([sample()], {A: 0, B: 0}),
        ([sample((1, 100), (2, 200), (3, 50))], {A: 300, B: 50}),
        ([sample((1, 100), (4, 70_000), (9, 70_000))], {A: 100, B: 0}),  # 4: no container; 9: unknown
        ([sample((1, 100), (2, None), (3, 50))], {A: None, B: 50}),
        ([sample((1, 100), has_list=False)], {A: None, B: None}),
        ([sample((1, 100), uuid=uuid_of(1))], {A: None, B: None}),
        ([], {A: None, B: None}),
    ],
)
def test_the_usage_of_a_share_is_that_of_its_containers_processes(
    samples: list[NvmlSample], used: dict[Key, int | None]
) -> None:
    usages = share_usages(samples, [sharing("a"), sharing("b")], CONTAINER_OF_PID.get)
    assert {usage.key: usage.used for usage in usages} == used


# --- exceeded shares

LIMIT = 20_000
OVER = LIMIT + 401  # more than 2 % above


def exceeded_after(samples: list[dict[Key, int | None]]) -> list[set[Key]]:
    """Return which shares are exceeded after each sample. A sample has the memory that each share uses."""
    strikes: dict[Key, int] = {}
    exceeded_shares = []
    for used_by in samples:
        usages = [ShareUsage(key, GPU, LIMIT, used) for key, used in used_by.items()]
        strikes, exceeded = count_strikes(strikes, usages)
        exceeded_shares.append({usage.key for usage in exceeded})
    return exceeded_shares


@pytest.mark.parametrize(
    ("samples", "exceeded"),
    [
        ([{A: OVER, B: 10}, {A: OVER, B: 10}], [set(), {A}]),
        ([{A: OVER, B: OVER}, {A: OVER, B: OVER}], [set(), {A, B}]),
        ([{A: OVER}, {A: LIMIT}, {A: OVER}], [set(), set(), set()]),  # twice, but not in a row
        ([{A: OVER}, {A: None}, {A: OVER}], [set(), set(), {A}]),  # an unknown value does not reset strikes
        ([{A: None}] * 5, [set()] * 5),  # an unknown value is no strike
        ([{A: OVER}, {A: None}, {A: None}], [set()] * 3),
        ([{A: LIMIT + 400}] * 3, [set()] * 3),  # within the tolerance
        ([{A: LIMIT, B: 0}] * 3, [set()] * 3),
        ([{A: OVER}, {}, {A: OVER}], [set()] * 3),  # the container was replaced
    ],
)
def test_a_share_is_exceeded_after_two_samples_in_a_row(
    samples: list[dict[Key, int | None]], exceeded: list[set[Key]]
) -> None:
    assert exceeded_after(samples) == exceeded


def test_a_small_share_has_a_minimum_tolerance() -> None:
    assert not ShareUsage(A, GPU, 100, 164).is_excessive
    assert ShareUsage(A, GPU, 100, 165).is_excessive


# --- removed MIG devices


def reading_with(*mig_uuids: str, **facts: Any) -> Any:
    """Return a reading of one GPU with these MIG devices and these other facts."""
    reading = SimulatedGpuReader("n", 1).latest()
    [gpu] = reading.inventory or ()
    devices: Any = [{"uuid": uuid, "profile": "1g.10gb", "memory_mib": 9728} for uuid in mig_uuids]
    changed: Any = {**gpu, "uuid": GPU, "mig_devices": devices, **facts}
    return replace(reading, inventory=(changed,))


@pytest.mark.parametrize(
    ("reading", "missing"),
    [
        (reading_with(MIG_A, MIG_B), []),
        (reading_with(MIG_B), [(A, MIG_A)]),
        (reading_with(), [(A, MIG_A)]),
        (reading_with(fault="gpu_lost"), []),  # the fault of the GPU is reported instead
        (reading_with(uuid=uuid_of(1)), []),  # the device's GPU is not listed
    ],
)
def test_a_mig_device_is_missing_when_its_healthy_gpu_does_not_list_it(
    reading: Any, missing: list[tuple[Key, str]]
) -> None:
    assert missing_devices(reading, [container("a", gpu_uuids=(MIG_A,), parent_gpus=(GPU,))]) == missing


# --- plans after a kill

WHY = Reason(code="gpu_memory_exceeded", message="too much")


def apply_answer(state: AgentState, *assignments: Assignment) -> None:
    answer = SyncAnswer(
        control_plane_id="cpl_1",
        node_id="nod_1",
        generation=5,
        report_interval_s=5,
        assignments=list(assignments),
    )
    assert state.apply_answer(answer, 0) is AnswerOutcome.APPLIED


def apply_listing(state: AgentState, *containers: Container) -> None:
    state.apply_listing(state.begin_listing(), containers, [])


@pytest.fixture
def state() -> AgentState:
    """The state of an agent with two running containers that share a GPU."""
    made = AgentState("cpl_1", 0)
    apply_answer(made, with_share(wanted("a", spec={"restart": "always"})), with_share(wanted("b")))
    apply_listing(made, sharing("a"), sharing("b"))
    return made


def actions(state: AgentState, now: float = 100) -> list[Any]:
    plan = state.plan(now)
    assert plan is not None
    return list(plan.actions)


def phase_and_code(state: AgentState, instance_id: str) -> tuple[Phase, str | None]:
    instances = state.reported_state().instances or ()
    [instance] = [one for one in instances if one.instance_id == instance_id]
    return instance.phase, instance.reason.code if instance.reason else None


def test_a_killed_container_is_not_restarted_by_its_policy(state: AgentState) -> None:
    state.kill(A, WHY)
    assert actions(state) == [Kill(sharing("a"))]
    ended = exited("a", exit_code=137, gpu_uuids=(GPU,), share=SHARE)
    apply_listing(state, ended, sharing("b"))
    assert actions(state) == [Release(ended, (), (GPU,))]
    state.released(A)
    apply_listing(state, ended, sharing("b"))
    assert actions(state) == []
    assert actions(state, now=10_000) == []
    assert phase_and_code(state, "a") == (Phase.EXITED, "gpu_memory_exceeded")
    assert phase_and_code(state, "b") == (Phase.RUNNING, None)


def test_a_container_that_ended_before_the_kill_follows_its_policy(state: AgentState) -> None:
    state.kill(A, WHY)
    apply_listing(state, exited("a", exit_code=0, gpu_uuids=(GPU,), share=SHARE), sharing("b"))
    assert phase_and_code(state, "a") == (Phase.STARTING, "restarting")


def test_an_ended_container_is_not_killed(state: AgentState) -> None:
    ended = exited("a", exit_code=3, gpu_uuids=(GPU,), share=SHARE)
    apply_listing(state, ended, sharing("b"))
    state.kill(A, WHY)
    assert not any(isinstance(action, Kill) for action in actions(state))


def test_containers_with_whole_gpus_or_without_gpus_are_not_watched() -> None:
    state = AgentState("cpl_1", 0)
    apply_answer(state, wanted("a", gpus=(GPU,)))
    apply_listing(state, container("a", gpu_uuids=(GPU,)), container("c"))
    assert state.watched_containers() == []


# --- the whole agent


def reason_of(server: TinyControlPlane, assigned: Assignment) -> Reason | None:
    return server.instances()[assigned.instance_id, assigned.attempt].reason


def test_a_real_container_over_its_share_is_killed_alone(docker_node: DockerNode, tmp_path: Path) -> None:
    """The real NVML binding reads the processes of both containers from one GPU's list."""
    nvml = NvmlStandin(tmp_path, "gpus 2")
    api: Any = docker_node.client.api

    def pid_of(assigned: Assignment) -> int:
        """Return the pid of the container's program; 0: it has ended."""
        return int(api.inspect_container(f"mooring-{assigned.instance_id}-1")["State"]["Pid"])

    greedy, modest, whole = (
        with_share(docker_assignments.assignment(restart="always")),
        with_share(docker_assignments.assignment()),
        with_gpus(docker_assignments.assignment(), uuid_of(1)),
    )
    reader = NvmlGpuReader(SELDOM, nvml.environment)
    runtime = docker_assignments.runtime_on(docker_node)
    with closing(reader), agent_with(runtime, reader, ProcessContainers().container_of, tmp_path) as server:
        server.wants(greedy, modest, whole)
        wait_until(lambda: {server.phase(assigned) for assigned in (greedy, modest, whole)} == {"running"})
        nvml.write(
            "gpus 2",
            f"process 0 compute {pid_of(greedy)} 30000",
            f"process 0 compute {pid_of(modest)} 19000",
            f"process 1 compute {pid_of(whole)} 80000",  # a whole GPU has no limit
        )
        wait_until(lambda: server.phase(greedy) == "exited", timeout_s=15)
        reason = reason_of(server, greedy)
        assert reason is not None and reason.code == "gpu_memory_exceeded"
        assert "30000 MiB" in reason.message and "20000 MiB" in reason.message
        assert (server.phase(modest), server.phase(whole)) == ("running", "running")
        assert pid_of(modest) and pid_of(whole) and not pid_of(greedy)
        assert not any(report.incidents for _, report in server.reports)
    docker_node.remove_containers()


def test_a_simulated_container_over_its_share_is_killed(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(start_s=0)
    reader = SimulatedGpuReader("n", 1, users=runtime.gpu_users)
    [gpu] = reader.latest().inventory or ()
    greedy, modest = (
        with_share(builders.assignment(command=command), gpu=gpu["uuid"])
        for command in (["gpu-memory", "30000"], ["gpu-memory", "20000"])
    )
    with agent_with(runtime, reader, reader.container_of, tmp_path) as server:
        server.wants(greedy, modest)
        wait_until(lambda: server.phase(greedy) == "exited", timeout_s=10)
        reason = reason_of(server, greedy)
        assert reason is not None and reason.code == "gpu_memory_exceeded"
        assert server.phase(modest) == "running"


def test_a_removed_mig_device_fails_its_instance_alone(tmp_path: Path) -> None:
    mig_gpu = ["gpus 1", "set 0 mig 1"]
    device_a, device_b = (f"slice 0 {uuid} 9728 NVIDIA H100 80GB HBM3 MIG 1g.10gb" for uuid in (MIG_A, MIG_B))
    nvml = NvmlStandin(tmp_path, *mig_gpu, device_a, device_b)
    pace = Pace(sample_interval_s=0.1, inventory_interval_s=0.2)
    lost, kept = with_mig(builders.assignment(), MIG_A), with_mig(builders.assignment(), MIG_B)
    reader = NvmlGpuReader(pace, nvml.environment)
    with closing(reader), agent_with(SimulatedRuntime(start_s=0), reader, lambda _: None, tmp_path) as server:
        server.wants(lost, kept)
        wait_until(lambda: server.phase(lost) == server.phase(kept) == "running")
        nvml.write(*mig_gpu, device_b)
        wait_until(lambda: server.phase(lost) == "exited", timeout_s=10)
        reason = reason_of(server, lost)
        assert reason is not None and reason.code == "mig_device_lost" and MIG_A in reason.message
        assert server.phase(kept) == "running"
