"""A GPU is released when nothing of its last container is left on it, else with an incident (R11)."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mooring.agent.decide.reconcile import Release, Remove, Restart, Start
from mooring.agent.decide.snapshot import ActionKind, Key, Work
from mooring.agent.gpus.reader import NvmlGpuReader, Pace
from mooring.agent.gpus.release import ReleaseGate
from mooring.agent.runtime import Container
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome
from mooring.core.instance.state import Phase
from mooring.schemas.agent import Assignment, Removal, SyncAnswer
from tests.agent.agents import agent_with
from tests.agent.builders import assignment, container, decided, exited, removal, wanted
from tests.agent.control_planes import TinyControlPlane
from tests.agent.nvml_children import process
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

A1: Key = ("a", 1)
GPU, OTHER = uuid_of(0), uuid_of(1)
ENDED = exited(gpu_uuids=(GPU,))
TWO_GPUS = ("gpus 2", "set 0 used_mib 5", "set 1 used_mib 5")


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    return NvmlStandin(tmp_path, *TWO_GPUS)


@pytest.fixture
def gate(reader: NvmlGpuReader) -> ReleaseGate:
    return ReleaseGate(reader, lambda _: None, within_s=0.3)


def wait_for_memory(reader: NvmlGpuReader, *, mib: int) -> None:
    """Wait until the first GPU reports this much memory in use."""

    def is_reported() -> bool:
        reading = reader.fresh(5)
        return reading is not None and reading.samples[0]["memory_used_mib"] == mib

    wait_until(is_reported)


def _processes(reader: NvmlGpuReader) -> list[object]:
    reading = reader.fresh(5)
    return list(reading.samples[0]["processes"] or ()) if reading else []


# --- one GPU


def test_an_idle_gpu_is_released_at_once(gate: ReleaseGate) -> None:
    gate.note_start([GPU])
    began = time.monotonic()
    assert gate.wait(ENDED, [GPU]) == {}
    assert time.monotonic() - began < 0.25


def test_a_process_that_came_after_the_start_delays_the_release(gate: ReleaseGate, nvml: NvmlStandin) -> None:
    gate.note_start([GPU, OTHER])
    with process() as pid:
        nvml.write(*TWO_GPUS, f"process 0 compute {pid} 100", f"process_name {pid} trainer")
        busy = gate.wait(ENDED, [GPU, OTHER])
    assert list(busy) == [GPU]
    assert f"{pid} (trainer)" in busy[GPU]


def test_the_gpu_is_released_once_the_process_has_left_it(reader: NvmlGpuReader, nvml: NvmlStandin) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=20)
    gate.note_start([GPU])
    with process() as pid:
        nvml.write(*TWO_GPUS, f"process 0 compute {pid} 100")
        results: list[dict[str, str]] = []
        waiting = threading.Thread(target=lambda: results.append(gate.wait(ENDED, [GPU])))
        waiting.start()
        wait_until(lambda: reader.latest().samples[0]["processes"])
        assert results == []
        nvml.write(*TWO_GPUS)
        waiting.join(5)
    assert results == [{}]


def test_earlier_processes_do_not_delay_the_release(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    """For example a display server, whose memory use changes."""
    with process() as pid:
        nvml.write("gpus 2", f"process 0 graphics {pid} 300", "set 0 used_mib 305")
        wait_for_memory(reader, mib=305)
        gate.learn(reader.latest(), in_use=())
        gate.note_start([GPU])
        nvml.write("gpus 2", f"process 0 graphics {pid} 900", "set 0 used_mib 905")
        assert gate.wait(ENDED, [GPU]) == {}


def test_a_restarted_agent_knows_the_processes_of_the_container(
    reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    """Its gate has noted no start, so it knows only which container each process is in."""
    with process() as own, process() as foreign:
        nvml.write(*TWO_GPUS, f"process 0 compute {own} 1", f"process 0 compute {foreign} 1")
        wait_until(lambda: len(_processes(reader)) == 2)
        gate = ReleaseGate(reader, lambda pid: ENDED.container_id if pid == own else None, within_s=0.3)
        busy = gate.wait(ENDED, [GPU])
    assert f"{own} (" in busy[GPU] and f"{foreign} (" not in busy[GPU]


@pytest.mark.parametrize(("left_mib", "is_free"), [(5, True), (5 + 800, True), (5 + 900, False)])
def test_the_release_needs_the_idle_memory(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin, left_mib: int, *, is_free: bool
) -> None:
    """The tolerance is 1 % of the GPU's 80 GiB."""
    gate.learn(reader.latest(), in_use=())
    gate.note_start([GPU])
    nvml.write("gpus 2", f"set 0 used_mib {left_mib}")
    busy = gate.wait(ENDED, [GPU])
    assert (busy == {}) is is_free
    if not is_free:
        assert busy[GPU].endswith("905 MiB of its memory are still in use (idle: 5 MiB)")
        # As after an admin has cleared the quarantine: the memory now in use becomes the idle memory.
        gate.learn(reader.latest(), in_use=())
        assert gate.wait(ENDED, [GPU]) == {}


def test_a_gpu_in_use_does_not_change_the_idle_memory(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    gate.learn(reader.latest(), in_use=[GPU])
    nvml.write("gpus 2", "set 0 used_mib 40000")
    assert gate.wait(ENDED, [GPU]) == {}  # with unknown idle memory, no use is too much


def test_values_that_the_driver_does_not_report_do_not_delay_the_release(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    gate.learn(reader.latest(), in_use=())
    gate.note_start([GPU])
    unsupported = ["MemoryInfo", "MemoryInfo_v2"]
    for kind in ("Compute", "Graphics"):
        unsupported += [f"{kind}RunningProcesses_v{version}" for version in (2, 3)]
    with process() as pid:
        busy_gpu = ["gpus 2", "set 0 used_mib 40000", f"process 0 compute {pid} 100"]
        nvml.write(*busy_gpu, *(f"error nvmlDeviceGet{call} 3" for call in unsupported))
        assert gate.wait(ENDED, [GPU]) == {}


def test_a_gpu_without_a_sample_is_not_released(tmp_path: Path) -> None:
    nvml = NvmlStandin(tmp_path, *TWO_GPUS)
    pace = Pace(sample_interval_s=60, answer_within_s=0.1, retry_pauses_s=(60, 60))
    with closing(NvmlGpuReader(pace, nvml.environment)) as reader:
        assert wait_until(lambda: reader.latest().samples)
        gate = ReleaseGate(reader, lambda _: None, within_s=0.1)
        nvml.write(*TWO_GPUS, "hang nvmlDeviceGetUtilizationRates 30")
        assert "does not report" in gate.wait(ENDED, [GPU])[GPU]


def test_a_gpu_with_a_fault_is_released_and_has_the_fault_in_its_inventory(
    gate: ReleaseGate, nvml: NvmlStandin, reader: NvmlGpuReader
) -> None:
    nvml.write(*TWO_GPUS, "lost 0")
    assert gate.wait(ENDED, [GPU]) == {}
    inventory = {gpu["uuid"]: gpu["fault"] for gpu in reader.latest().inventory or ()}
    assert inventory[GPU] == "gpu_lost"


def test_a_simulated_gpu_is_released_also_where_no_reader_knows_it(reader: NvmlGpuReader) -> None:
    simulated = SimulatedGpuReader("n", 1)
    [gpu] = simulated.latest().inventory or ()
    for each_reader in (simulated, reader):
        gate = ReleaseGate(each_reader, lambda _: None, within_s=0)
        gate.note_start([gpu["uuid"]])
        assert gate.wait(exited(gpu_uuids=(gpu["uuid"],)), [gpu["uuid"]]) == {}


# --- plans and reports during a release


def state_with(*items: Assignment | Removal | Container) -> AgentState:
    """Return the state of an agent with these containers, assignments and removals."""
    state = AgentState("cpl_1", 0)
    state.apply_listing(state.begin_listing(), [one for one in items if isinstance(one, Container)], [])
    answer = SyncAnswer(
        control_plane_id="cpl_1",
        node_id="nod_1",
        generation=5,
        report_interval_s=5,
        assignments=[one for one in items if isinstance(one, Assignment)],
        removals=[one for one in items if isinstance(one, Removal)],
    )
    assert state.apply_answer(answer, 0) is AnswerOutcome.APPLIED
    return state


def actions(state: AgentState) -> list[type]:
    """Return the kinds of the planned actions. A release is noted as begun."""
    plan = state.plan(100)
    assert plan is not None
    for action in plan.actions:
        if isinstance(action, Release):
            state.begin_work((action.container.instance_id, 1), ActionKind.RELEASE, action.gpu_uuids)
    return [type(action) for action in plan.actions]


def phase(state: AgentState) -> Phase | None:
    """Return the reported phase of instance `a`; None: it is not reported."""
    return next((one.phase for one in state.reported_state().instances or () if one.instance_id == "a"), None)


@pytest.mark.parametrize("assigned", [wanted(gpus=(GPU,)), wanted(want="stopped", gpus=(GPU,))])
def test_the_end_of_a_container_is_reported_when_its_gpus_are_idle(assigned: Assignment) -> None:
    state = state_with(assigned, ENDED)
    assert actions(state) == [Release]
    assert phase(state) is Phase.RUNNING
    assert state.reported_state().instances[0].exit_code is None  # type: ignore[index]
    assert state.gpus_in_use() == {GPU}
    state.released(A1)
    assert phase(state) is Phase.EXITED
    state.apply_listing(state.begin_listing(), [ENDED], [])
    assert actions(state) == []
    assert (phase(state), state.gpus_in_use()) == (Phase.EXITED, set())


def test_a_removal_by_another_program_is_reported_when_the_gpus_are_idle() -> None:
    state = state_with(wanted(gpus=(GPU,)), container(gpu_uuids=(GPU,)))
    assert actions(state) == []
    state.apply_listing(state.begin_listing(), [], [])
    assert actions(state) == [Release]
    assert phase(state) is Phase.RUNNING
    state.released(A1)
    assert phase(state) is None


def test_a_removal_and_the_next_start_wait_for_the_release() -> None:
    next_on_gpu = wanted("b", gpus=(GPU,))
    state = state_with(removal(), ENDED, next_on_gpu)
    assert actions(state) == [Release]
    waiting = [one for one in state.reported_state().instances or () if one.instance_id == "b"]
    assert waiting[0].reason is not None and waiting[0].reason.code == "waiting_for_removal"
    state.released(A1)
    assert actions(state) == [Remove, Start]


def test_a_restart_by_policy_keeps_its_gpus() -> None:
    state = state_with(wanted(gpus=(GPU,), spec={"restart": "always"}), ENDED)
    assert actions(state) == []
    assert phase(state) is Phase.STARTING
    plan = state.plan(102)
    assert plan is not None and [type(action) for action in plan.actions] == [Restart]


def test_gpus_that_others_use_are_left_out_of_the_release() -> None:
    """A restarted agent finds containers that ended earlier, and whose GPUs others use by now."""
    holder = container("b", gpu_uuids=(GPU,))
    both = exited(gpu_uuids=(GPU, OTHER))
    [release] = decided(both, holder, unreleased={A1: both}).actions
    assert release == Release(both, (OTHER,))
    start = {("b", 1): Work(ActionKind.START, (GPU,))}
    [release] = decided(both, wanted("b", gpus=(GPU,)), work=start, unreleased={A1: both}).actions
    assert release == Release(both, (OTHER,))


def test_a_container_without_gpus_needs_no_release() -> None:
    state = state_with(wanted(), exited())
    assert actions(state) == []
    assert phase(state) is Phase.EXITED


# --- the whole agent


@contextmanager
def agent_on(reader: NvmlGpuReader, directory: Path, within_s: float) -> Iterator[TinyControlPlane]:
    engine = SimulatedRuntime(start_s=0)
    with agent_with(engine, reader, lambda _: None, directory, release_within_s=within_s) as server:
        yield server


def stopped(assigned: Assignment) -> Assignment:
    return assigned.model_copy(update={"want": "stopped", "may_start": False})


def test_a_stop_is_reported_without_waiting_for_the_next_sample(
    reader: NvmlGpuReader, tmp_path: Path
) -> None:
    assigned = assignment(gpu_uuids=(GPU,))
    with agent_on(reader, tmp_path, within_s=30) as server:
        server.wants(assigned)
        wait_until(lambda: server.phase(assigned) == "running")
        began = time.monotonic()
        server.wants(stopped(assigned))
        wait_until(lambda: server.phase(assigned) == "exited")
        assert time.monotonic() - began < 10  # the next sample comes after 60 s
        assert not any(report.incidents for _, report in server.reports)


def test_the_end_and_the_incident_are_in_one_report(
    reader: NvmlGpuReader, nvml: NvmlStandin, tmp_path: Path
) -> None:
    assigned = assignment(gpu_uuids=(GPU,))
    with agent_on(reader, tmp_path, within_s=0.3) as server, process() as pid:
        server.wants(assigned)
        wait_until(lambda: server.phase(assigned) == "running")
        nvml.write(*TWO_GPUS, f"process 0 compute {pid} 100")
        server.wants(stopped(assigned))
        wait_until(lambda: server.phase(assigned) == "exited")
        with_the_end = [
            report
            for _, report in server.reports
            if any(one.phase == "exited" for one in report.instances or ())
        ]
        [incident] = with_the_end[0].incidents
        assert (incident.uuid, incident.code) == (GPU, "gpu_not_released")
        assert str(pid) in incident.message
