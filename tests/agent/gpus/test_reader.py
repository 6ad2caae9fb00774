"""The GPU reader with a real child process, which loads a simulated NVML library."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mooring.agent.gpus.reader import GpuReading, NvmlGpuReader, Pace
from mooring.agent.nvml.types import NvmlGpuFacts
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

StartReader = Callable[..., NvmlGpuReader]

QUICK = Pace(
    sample_interval_s=0.02,
    inventory_interval_s=0.2,
    answer_within_s=0.3,
    first_answer_within_s=5,
    retry_pauses_s=(0.02, 0.05),
    lost_pauses_s=(0.1, 0.1),
    absent_pauses_s=(0.05, 0.05),
)
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    return NvmlStandin(tmp_path, "gpus 3")


@pytest.fixture
def start_reader(nvml: NvmlStandin) -> Iterator[StartReader]:
    """Starts a reader on the simulated library. All readers are closed at the end."""
    with ExitStack() as stack:
        yield lambda pace=QUICK: stack.enter_context(closing(NvmlGpuReader(pace, nvml.environment)))


def _faults(reading: GpuReading) -> list[str | None]:
    return [gpu["fault"] for gpu in sorted(reading.inventory or (), key=_index)]


def _index(gpu: NvmlGpuFacts) -> int:
    return gpu["index"]


def _until(reader: NvmlGpuReader, accepted: Callable[[GpuReading], object]) -> GpuReading:
    """Return the first accepted reading. Each call of `latest` must return at once, even if NVML hangs."""
    slowest_s = 0.0

    def read() -> GpuReading | None:
        nonlocal slowest_s
        began = time.monotonic()
        reading = reader.latest()
        slowest_s = max(slowest_s, time.monotonic() - began)
        return reading if accepted(reading) else None

    reading = wait_until(read, timeout_s=20)  # a hang ends after 30 s
    assert reading is not None
    assert slowest_s < 0.25  # less than `answer_within_s` of QUICK, which aborts a hanging call
    return reading


def _error(reading: GpuReading) -> str | None:
    return reading.error["code"] if reading.error else None


def _is_healthy(reading: GpuReading) -> bool:
    return reading.error is None and _faults(reading) == [None] * 3 and len(reading.samples) == 3


def test_before_the_first_reading_everything_is_unknown(nvml: NvmlStandin, start_reader: StartReader) -> None:
    nvml.write("gpus 3", "hang nvmlInitWithFlags 0.3")
    reader = start_reader()
    assert reader.latest().inventory is None
    assert _error(reader.latest()) == "not_read_yet"
    assert not reader.wait_first(0)
    assert reader.wait_first(10)
    assert _error(reader.latest()) is None


def test_a_reading_has_facts_samples_and_versions(start_reader: StartReader) -> None:
    reading = _until(start_reader(), _is_healthy)
    assert [sample["uuid"] for sample in reading.samples] == [uuid_of(0), uuid_of(1), uuid_of(2)]
    assert (reading.driver_version, reading.cuda_version) == ("580.95.05", "13.0")
    assert time.monotonic() - reading.taken_at < 1
    assert not reading.simulated


def test_samples_and_facts_are_refreshed(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    nvml.write("gpus 3", "set 1 util 88", "set 1 limit_mw 350000")
    _until(reader, lambda reading: reading.samples and reading.samples[1]["utilization_gpu_pct"] == 88)
    _until(reader, lambda reading: reading.inventory and reading.inventory[1]["power_limit_w"] == 350)


def test_a_node_without_the_library_is_a_cpu_node_until_it_is_installed(
    nvml: NvmlStandin, start_reader: StartReader, tmp_path: Path
) -> None:
    library = nvml.environment["LD_LIBRARY_PATH"]
    nvml.environment["LD_LIBRARY_PATH"] = str(tmp_path / "later")
    reader = start_reader()
    assert reader.wait_first(10)
    assert (reader.latest().inventory, reader.latest().error) == ((), None)
    (tmp_path / "later").symlink_to(library)
    _until(reader, _is_healthy)


def test_a_removed_library_is_an_error(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    # The first error ends the child; the next child does not find the library.
    nvml.write("gpus 3", "error nvmlDeviceGetUtilizationRates 9", "error nvmlInitWithFlags 12")
    reading = _until(reader, lambda reading: _error(reading) == "library_not_found")
    assert _faults(reading) == [None] * 3


@pytest.mark.parametrize(
    ("number", "code"), [(9, "driver_not_loaded"), (18, "version_mismatch"), (999, "unknown")]
)
def test_a_driver_that_does_not_start_is_retried(
    nvml: NvmlStandin, start_reader: StartReader, number: int, code: str
) -> None:
    nvml.write("gpus 3", f"error nvmlInitWithFlags {number}")
    reader = start_reader()
    reading = _until(reader, lambda reading: _error(reading) == code)
    assert reading.inventory is None
    nvml.write("gpus 3")
    _until(reader, _is_healthy)


@pytest.mark.parametrize(("number", "code"), [(9, "driver_not_loaded"), (18, "version_mismatch")])
def test_a_failed_driver_leaves_the_last_facts_and_no_samples(
    nvml: NvmlStandin, start_reader: StartReader, number: int, code: str
) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    first_child = reader.child_pid
    nvml.write("gpus 3", f"error nvmlDeviceGetPowerUsage {number}", f"error nvmlInitWithFlags {number}")
    reading = _until(reader, lambda reading: _error(reading) == code)
    assert (reading.samples, _faults(reading)) == ((), [None] * 3)
    nvml.write("gpus 3")
    _until(reader, _is_healthy)
    assert reader.child_pid != first_child  # only a new process loads the library of an upgraded driver


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_a_hanging_call_is_aborted_and_delays_no_caller(
    nvml: NvmlStandin, start_reader: StartReader, function: str
) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    hung = psutil.Process(reader.child_pid)
    nvml.write("gpus 3", f"hang {function} 30")
    reading = _until(reader, lambda reading: _error(reading) == "nvml_hung")
    assert (reading.samples, _faults(reading)) == ((), [None] * 3)
    wait_until(lambda: not hung.is_running())
    nvml.write("gpus 3")
    _until(reader, _is_healthy)


def test_a_hang_at_startup_is_aborted(nvml: NvmlStandin, tmp_path: Path) -> None:
    nvml.write("gpus 3", "hang nvmlInitWithFlags 30")
    # A process that does not hang must answer within that time, also on a busy machine.
    pace = Pace(first_answer_within_s=1.5, retry_pauses_s=(0.02, 0.02))
    with closing(NvmlGpuReader(pace, nvml.environment)) as reader:
        _until(reader, lambda reading: _error(reading) == "nvml_hung")
        nvml.write("gpus 3")
        _until(reader, _is_healthy)


def test_closing_does_not_wait_for_a_hanging_call(nvml: NvmlStandin) -> None:
    nvml.write("gpus 3", "hang nvmlDeviceGetName 30")
    reader = NvmlGpuReader(Pace(), nvml.environment)
    wait_until(lambda: reader.child_pid)
    child = psutil.Process(reader.child_pid)
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < 2
    wait_until(lambda: not child.is_running())
    assert reader.child_pid is None


def test_a_killed_child_is_replaced(start_reader: StartReader) -> None:
    reader = start_reader(Pace(sample_interval_s=0.02, retry_pauses_s=(0.2, 0.2)))
    _until(reader, _is_healthy)
    assert reader.child_pid
    os.kill(reader.child_pid, signal.SIGKILL)
    _until(reader, lambda reading: _error(reading) == "nvml_ended")
    _until(reader, _is_healthy)


@pytest.mark.skipif(
    # In CI the test is not skipped: without the freezer it fails.
    os.environ.get("CI") != "true" and not os.access(FREEZER, os.W_OK),
    reason="needs root and the freezer of cgroup v1",
)
def test_children_that_survive_sigkill_are_left_behind_up_to_a_limit(start_reader: StartReader) -> None:
    """A frozen process survives SIGKILL until it is thawed, like one in an uninterruptible call."""
    cgroup = FREEZER / f"mooring-test-{os.getpid()}"
    cgroup.mkdir()
    frozen: set[int] = set()

    def freeze_a_new_child() -> None:
        child = reader.child_pid
        if child and child not in frozen:
            frozen.add(child)
            (cgroup / "cgroup.procs").write_text(str(child))
            (cgroup / "freezer.state").write_text("FROZEN")

    def is_limit_reached() -> bool:
        freeze_a_new_child()
        error = reader.latest().error
        return error is not None and "survive SIGKILL" in error["message"]

    try:
        reader = start_reader(replace(QUICK, first_answer_within_s=1))
        wait_until(is_limit_reached, timeout_s=20)
        assert _error(reader.latest()) == "nvml_hung"
        assert len(frozen) == 3
        (cgroup / "freezer.state").write_text("THAWED")
        _until(reader, _is_healthy)
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (cgroup / "cgroup.procs").read_text())
        cgroup.rmdir()


def test_a_gpu_lost_at_run_time_is_listed_as_lost_and_the_others_are_read(
    nvml: NvmlStandin, start_reader: StartReader
) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    first_child = reader.child_pid
    nvml.write("gpus 3", "lost 1")
    reading = _until(reader, lambda reading: _faults(reading) == [None, "gpu_lost", None])
    assert _error(reading) is None
    wait_until(lambda: reader.child_pid not in {None, first_child})
    _until(reader, lambda reading: [sample["index"] for sample in reading.samples] == [0, 2])
    assert _faults(reader.latest()) == [None, "gpu_lost", None]
    nvml.write("gpus 3")
    _until(reader, _is_healthy)


def test_a_gpu_that_needs_a_reset_is_reported(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    nvml.write("gpus 3", "error nvmlDeviceGetPowerUsage 16 2", "error nvmlDeviceGetName 16 2")
    _until(reader, lambda reading: _faults(reading) == [None, None, "reset_required"])
    nvml.write("gpus 3")
    _until(reader, _is_healthy)


def test_gpus_that_are_no_longer_listed_are_lost(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    nvml.write("gpus 1")
    lost = [None, "gpu_lost", "gpu_lost"]
    _until(reader, lambda reading: _faults(reading) == lost and len(reading.samples) == 1)
    nvml.write("gpus 3")
    _until(reader, _is_healthy)


def test_a_gpu_that_does_not_open_is_unreadable(nvml: NvmlStandin, start_reader: StartReader) -> None:
    nvml.write("gpus 3", "error nvmlDeviceGetHandleByIndex_v2 4 1")
    reading = _until(start_reader(), lambda reading: len(reading.samples) == 2)
    assert reading.unreadable == ({"index": 1, "uuid": None, "code": "no_permission"},)


def test_a_new_fault_refreshes_the_inventory_at_once(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader(Pace(sample_interval_s=0.02, inventory_interval_s=3600))
    _until(reader, _is_healthy)
    nvml.write("gpus 3", "lost 0")
    _until(reader, lambda reading: _faults(reading) == ["gpu_lost", None, None])


def test_events_keep_their_order_and_outlive_the_child(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    nvml.write("gpus 3", "xid 0 31", "xid 2 79")
    reading = _until(reader, lambda reading: len(reading.events) == 2)
    events = [(event["uuid"], event["code"]) for event in reading.events]
    assert events == [(uuid_of(0), "xid_31"), (uuid_of(2), "xid_79")]
    assert reader.child_pid
    nvml.write("gpus 3")
    os.kill(reader.child_pid, signal.SIGKILL)
    _until(reader, _error)
    assert _until(reader, _is_healthy).events == reading.events


def test_waiting_for_events_does_not_delay_samples(start_reader: StartReader) -> None:
    """The child waits 5 s for an event, so four readings in less time prove that samples do not wait."""
    reader = start_reader()
    _until(reader, _is_healthy)
    began = time.monotonic()
    for _ in range(4):
        before = reader.latest().taken_at
        _until(reader, lambda reading, before=before: reading.taken_at > before)  # type: ignore[misc]
    assert time.monotonic() - began < 3


def test_a_child_that_gets_no_more_events_is_replaced(nvml: NvmlStandin, start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    first_child = reader.child_pid
    nvml.write("gpus 3", "error nvmlEventSetWait_v2 999")
    _until(reader, lambda reading: _error(reading) == "events_lost")
    nvml.write("gpus 3")
    _until(reader, _is_healthy)
    assert reader.child_pid != first_child


def test_the_child_is_outside_the_process_group_that_a_terminal_signals(start_reader: StartReader) -> None:
    reader = start_reader()
    _until(reader, _is_healthy)
    assert reader.child_pid
    assert os.getpgid(reader.child_pid) == reader.child_pid != os.getpgid(0)


def test_the_child_ends_with_its_parent(nvml: NvmlStandin) -> None:
    program = (
        "from mooring.agent.gpus.reader import NvmlGpuReader\n"
        "reader = NvmlGpuReader()\n"
        "reader.wait_first(10)\n"
        "print(reader.child_pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=nvml.environment
    ) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_until(lambda: not child.is_running())
