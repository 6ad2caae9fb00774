"""What is reported of GPUs, while they can be read and while they cannot."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mooring.agent.gpus.reader import NOT_READ_YET, GpuReading
from mooring.agent.gpus.telemetry import Telemetry, gpu_problem
from mooring.agent.simulated.gpus import GpuUser, SimulatedGpuReader, gpu_uuid
from tests.agent.builders import container

HUNG = {"code": "nvml_hung", "message": "No answer within 10 s"}


class FixedReader:
    """A GpuReader whose reading the test sets."""

    def __init__(self, reading: GpuReading) -> None:
        self.reading = reading

    def latest(self) -> GpuReading:
        return self.reading

    def wait_first(self, timeout_s: float) -> bool:
        return True

    def fresh(self, timeout_s: float) -> GpuReading:
        return self.reading

    def on_news(self, callback: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def reader() -> FixedReader:
    return FixedReader(SimulatedGpuReader("n", 2, "T4", users=lambda uuid: [GpuUser(f"on {uuid}")]).latest())


def test_the_last_inventory_is_reported_for_a_minute_after_a_failure(reader: FixedReader) -> None:
    clock = Clock()
    telemetry = Telemetry(reader, lambda _: None, clock)
    assert len(telemetry.inventory(telemetry.reading()) or ()) == 2
    reader.reading = replace(reader.reading, samples=(), error=HUNG)  # type: ignore[arg-type]
    for now, count in [(10.0, 2), (70.0, 2), (70.1, None)]:
        clock.now = now
        found = telemetry.inventory(telemetry.reading())
        assert (None if found is None else len(found)) == count
    reader.reading = replace(reader.reading, error=None)
    assert len(telemetry.inventory(telemetry.reading()) or ()) == 2


def test_no_gpus_and_unknown_gpus_differ() -> None:
    telemetry = Telemetry(FixedReader(GpuReading(0, inventory=())), lambda _: None)
    assert telemetry.inventory(telemetry.reading()) == []
    telemetry = Telemetry(FixedReader(GpuReading(0, error=NOT_READ_YET)), lambda _: None)
    assert telemetry.inventory(telemetry.reading()) is None


def test_only_a_failure_is_a_problem() -> None:
    assert gpu_problem(None) is None
    assert gpu_problem(NOT_READ_YET) is None
    problem = gpu_problem({"code": "driver_not_loaded", "message": "…"})
    assert problem is not None and problem.code == "driver_not_loaded"


def test_a_process_has_the_instance_of_its_container(reader: FixedReader) -> None:
    reading = reader.reading
    telemetry = Telemetry(reader, lambda _: "c-a-1")
    samples = telemetry.samples(reading, [container("a"), container("b")])
    assert [one.instance_id for sample in samples for one in sample.processes or ()] == ["a", "a"]
    telemetry = Telemetry(reader, lambda _: None)
    samples = telemetry.samples(reading, [container("a", gpu_uuids=(gpu_uuid("n", 0),))])
    assert [one.instance_id for sample in samples for one in sample.processes or ()] == [None, None]


def test_a_simulated_process_has_the_instance_of_its_container() -> None:
    users = {gpu_uuid("n", 0): [GpuUser("c-a-1"), GpuUser("c-b-1")], gpu_uuid("n", 1): [GpuUser("c-x-1")]}
    reader = SimulatedGpuReader("n", 2, "T4", users=lambda uuid: users[uuid])
    telemetry = Telemetry(reader, reader.container_of)
    samples = telemetry.samples(reader.latest(), [container("a"), container("b")])
    assert [one.instance_id for sample in samples for one in sample.processes or ()] == ["a", "b", None]
