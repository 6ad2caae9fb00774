"""A GPU is released if its last container left nothing on it, and quarantined otherwise (R11)."""

import threading
import time
from collections.abc import Callable, Iterator
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

NewGate = Callable[..., ReleaseGate]


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


def test_a_process_of_the_container_delays_the_release(gate: ReleaseGate, nvml: NvmlStandin) -> None:
    gate.note_start([GPU, OTHER])
    with process() as pid:
        nvml.write(*TWO_GPUS, f"process 0 compute {pid} 100", f"process_name {pid} trainer")
        busy = gate.wait(ENDED, [GPU, OTHER])
    assert list(busy) == [GPU]
    assert f"{pid} (trainer)" in busy[GPU]


def test_the_release_waits_for_the_process(reader: NvmlGpuReader, nvml: NvmlStandin) -> None:
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
    """A display server, whose memory changes."""
    with process() as pid:
        nvml.write("gpus 2", f"process 0 graphics {pid} 300", "set 0 used_mib 305")
        wait_for_memory(reader, mib=305)
        gate.learn(reader.latest(), in_use=())
        gate.note_start([GPU])
        nvml.write("gpus 2", f"process 0 graphics {pid} 900", "set 0 used_mib 905")
        assert gate.wait(ENDED, [GPU]) == {}


def test_after_a_restart_the_agent_knows_the_containers_processes(
    reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
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
    """Within 1 % of the GPU's 80 GiB."""
    gate.learn(reader.latest(), in_use=())
    gate.note_start([GPU])
    nvml.write("gpus 2", f"set 0 used_mib {left_mib}")
    busy = gate.wait(ENDED, [GPU])
    assert (busy == {}) is is_free
    if not is_free:
        assert busy[GPU].endswith("905 MiB of its memory are still in use, and 5 MiB when idle")
        # After an admin clears the quarantine, the current memory is the new idle memory.
        gate.learn(reader.latest(), in_use=())
        assert gate.wait(ENDED, [GPU]) == {}


def test_a_gpu_in_use_does_not_change_the_idle_memory(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    gate.learn(reader.latest(), in_use=[GPU])
    nvml.write("gpus 2", "set 0 used_mib 40000")
    assert gate.wait(ENDED, [GPU]) == {}  # the idle memory is unknown


def test_unknown_values_do_not_delay_the_release(
    gate: ReleaseGate, reader: NvmlGpuReader, nvml: NvmlStandin
) -> None:
    gate.learn(reader.latest(), in_use=())
    gate.note_start([GPU])
    silent = ["MemoryInfo", "MemoryInfo_v2"]
    silent += [f"{kind}RunningProcesses_v{version}" for kind in ("Compute", "Graphics") for version in (2, 3)]
    with process() as pid:
        busy = ["gpus 2", "set 0 used_mib 40000", f"process 0 compute {pid} 100"]
        nvml.write(*busy, *(f"error nvmlDeviceGet{call} 3" for call in silent))
        assert gate.wait(ENDED, [GPU]) == {}


def test_a_gpu_without_a_sample_is_not_released(tmp_path: Path) -> None:
    nvml = NvmlStandin(tmp_path, *TWO_GPUS)
    pace = Pace(sample_interval_s=60, watchdog_s=0.1, retry_pauses_s=(60, 60))
    with closing(NvmlGpuReader(pace, nvml.environment)) as reader:
        assert wait_until(lambda: reader.latest().samples)
        gate = ReleaseGate(reader, lambda _: None, within_s=0.1)
        nvml.write(*TWO_GPUS, "hang nvmlDeviceGetUtilizationRates 30")
        assert "does not report" in gate.wait(ENDED, [GPU])[GPU]


def test_a_gpu_with_a_fault_is_quarantined_by_its_inventory(
    gate: ReleaseGate, nvml: NvmlStandin, reader: NvmlGpuReader
) -> None:
    nvml.write(*TWO_GPUS, "lost 0")
    assert gate.wait(ENDED, [GPU]) == {}
    inventory = {gpu["uuid"]: gpu["fault"] for gpu in reader.latest().inventory or ()}
    assert inventory[GPU] == "gpu_lost"


def test_a_simulated_gpu_is_released(reader: NvmlGpuReader) -> None:
    simulated = SimulatedGpuReader("n", 1)
    [gpu] = simulated.latest().inventory or ()
    for of in (simulated, reader):
        gate = ReleaseGate(of, lambda _: None, within_s=0)
        gate.note_start([gpu["uuid"]])
        assert gate.wait(exited(gpu_uuids=(gpu["uuid"],)), [gpu["uuid"]]) == {}


# --- plans and reports during a release


def node(*things: Assignment | Removal | Container) -> AgentState:
    """Return the state of a node with these containers, assignments and removals."""
    known = AgentState("cpl_1", 0)
    known.apply_listing(known.begin_listing(), [one for one in things if isinstance(one, Container)], [])
    answer = SyncAnswer(
        control_plane_id="cpl_1",
        node_id="nod_1",
        generation=5,
        report_interval_s=5,
        assignments=[one for one in things if isinstance(one, Assignment)],
        removals=[one for one in things if isinstance(one, Removal)],
    )
    assert known.apply_answer(answer, 0) is AnswerOutcome.APPLIED
    return known


def actions(known: AgentState) -> list[type]:
    plan = known.plan(100)
    assert plan is not None
    for action in plan.actions:
        if isinstance(action, Release):
            known.begin_work((action.container.instance_id, 1), ActionKind.RELEASE, action.gpu_uuids)
    return [type(action) for action in plan.actions]


def phase(known: AgentState) -> Phase | None:
    return next((one.phase for one in known.reported_state().instances or () if one.instance_id == "a"), None)


@pytest.mark.parametrize("asked", [wanted(gpus=(GPU,)), wanted(want="stopped", gpus=(GPU,))])
def test_the_end_of_a_container_is_reported_when_its_gpus_are_idle(asked: Assignment) -> None:
    known = node(asked, ENDED)
    assert actions(known) == [Release]
    assert phase(known) is Phase.RUNNING
    assert known.reported_state().instances[0].exit_code is None  # type: ignore[index]
    assert known.gpus_in_use() == {GPU}
    known.released(A1)
    assert phase(known) is Phase.EXITED
    known.apply_listing(known.begin_listing(), [ENDED], [])
    assert actions(known) == []
    assert (phase(known), known.gpus_in_use()) == (Phase.EXITED, set())


def test_a_foreign_removal_is_reported_when_the_gpus_are_idle() -> None:
    known = node(wanted(gpus=(GPU,)), container(gpu_uuids=(GPU,)))
    assert actions(known) == []
    known.apply_listing(known.begin_listing(), [], [])
    assert actions(known) == [Release]
    assert phase(known) is Phase.RUNNING
    known.released(A1)
    assert phase(known) is None


def test_a_removal_and_the_next_start_wait_for_the_release() -> None:
    after = wanted("b", gpus=(GPU,))
    known = node(removal(), ENDED, after)
    assert actions(known) == [Release]
    waiting = [one for one in known.reported_state().instances or () if one.instance_id == "b"]
    assert waiting[0].reason is not None and waiting[0].reason.code == "waiting_for_removal"
    known.released(A1)
    assert actions(known) == [Remove, Start]


def test_a_restart_by_policy_keeps_its_gpus() -> None:
    known = node(wanted(gpus=(GPU,), spec={"restart": "always"}), ENDED)
    assert actions(known) == []
    assert phase(known) is Phase.STARTING
    plan = known.plan(102)
    assert plan is not None and [type(action) for action in plan.actions] == [Restart]


def test_gpus_of_other_containers_do_not_delay_the_release() -> None:
    """After a restart, the agent finds containers that ended earlier."""
    holder = container("b", gpu_uuids=(GPU,))
    both = exited(gpu_uuids=(GPU, OTHER))
    [release] = decided(both, holder, unreleased={A1: both}).actions
    assert release == Release(both, (OTHER,))
    start = {("b", 1): Work(ActionKind.START, (GPU,))}
    [release] = decided(both, wanted("b", gpus=(GPU,)), work=start, unreleased={A1: both}).actions
    assert release == Release(both, (OTHER,))


def test_a_container_without_gpus_needs_no_release() -> None:
    known = node(wanted(), exited())
    assert actions(known) == []
    assert phase(known) is Phase.EXITED


# --- the whole agent


@contextmanager
def agent_on(reader: NvmlGpuReader, directory: Path, within_s: float) -> Iterator[TinyControlPlane]:
    engine = SimulatedRuntime(start_s=0)
    with agent_with(engine, reader, lambda _: None, directory, release_within_s=within_s) as server:
        yield server


def stopped(asked: Assignment) -> Assignment:
    return asked.model_copy(update={"want": "stopped", "may_start": False})


def test_a_stop_is_reported_without_waiting_for_the_next_sample(
    reader: NvmlGpuReader, tmp_path: Path
) -> None:
    asked = assignment(gpu_uuids=(GPU,))
    with agent_on(reader, tmp_path, within_s=30) as server:
        server.wants(asked)
        wait_until(lambda: server.phase(asked) == "running")
        began = time.monotonic()
        server.wants(stopped(asked))
        wait_until(lambda: server.phase(asked) == "exited")
        assert time.monotonic() - began < 1
        assert not any(report.incidents for _, report in server.reports)


def test_the_end_and_the_incident_are_in_one_report(
    reader: NvmlGpuReader, nvml: NvmlStandin, tmp_path: Path
) -> None:
    asked = assignment(gpu_uuids=(GPU,))
    with agent_on(reader, tmp_path, within_s=0.3) as server, process() as pid:
        server.wants(asked)
        wait_until(lambda: server.phase(asked) == "running")
        nvml.write(*TWO_GPUS, f"process 0 compute {pid} 100")
        server.wants(stopped(asked))
        wait_until(lambda: server.phase(asked) == "exited")
        told = [
            report
            for _, report in server.reports
            if any(one.phase == "exited" for one in report.instances or ())
        ]
        [incident] = told[0].incidents
        assert (incident.uuid, incident.code) == (GPU, "gpu_not_released")
        assert str(pid) in incident.message
