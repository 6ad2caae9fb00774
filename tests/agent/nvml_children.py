"""Runs the NVML child process with the stand-in's library, for tests that send it requests directly."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mooring.agent.gpus.reader import Pace
from mooring.agent.nvml.child import NvmlChild
from mooring.core.gpu import GpuFacts
from mooring_client.schemas.gpus import Sample
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until

Ask = Callable[[str], dict[str, Any]]
Standin = Callable[..., NvmlStandin]

# The fields that each call of a sample fills. For memory and processes, an older call is the fallback.
SAMPLED = {
    "nvmlDeviceGetUtilizationRates": {"utilization_gpu_pct", "utilization_memory_pct"},
    "nvmlDeviceGetMemoryInfo_v2": {"memory_used_mib", "memory_total_mib"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetTemperatureV": {"temperature_c"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetFanSpeed": {"fan_pct"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
}
UNSUPPORTED = (3, 13, 25, 26)
PASSING = (2, 4, 5, 6, 7, 8, 10, 11, 12, 14, 17, 19, 20, 21, 22, 23, 24, 27, 29, 30, 999, 4711)
GPU_FAULTS = {15: "gpu_lost", 16: "reset_required", 28: "gpu_lost"}
# So rare that a test that waits for the next regular sample fails.
SELDOM = Pace(sample_interval_s=60)
NODE_FAULTS = {1: "uninitialized", 9: "driver_not_loaded", 18: "version_mismatch"}


@contextmanager
def asking(standin: NvmlStandin) -> Iterator[Ask]:
    """Run a child. Yields a function that requests `inventory` or `sample`, and returns the whole answer."""
    child = NvmlChild(standin.environment)
    try:
        yield lambda operation: child.ask({"op": operation}, 10)
    finally:
        child.kill()
        wait_until(child.reaped)


def asked_once(standin: NvmlStandin, operation: str) -> dict[str, Any]:
    with asking(standin) as ask:
        return ask(operation)


def asked_until(ask: Ask, operation: str, accepted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first accepted answer."""
    answers: list[dict[str, Any]] = []

    def answer_is_accepted() -> bool:
        answers.append(ask(operation))
        return bool(accepted(answers[-1]))

    try:
        wait_until(answer_is_accepted, timeout_s=5)
    except AssertionError:
        raise AssertionError(f"no answer was accepted, the last is {answers[-1]}") from None
    return answers[-1]


def samples_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["error"] is None, answer
    samples: list[dict[str, Any]] = answer["answer"]["samples"]
    for sample in samples:
        Sample.model_validate(sample, extra="forbid")
    return samples


def gpus_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["error"] is None, answer
    gpus: list[dict[str, Any]] = answer["answer"]["gpus"]
    for gpu in gpus:
        GpuFacts.model_validate(gpu, extra="forbid")
    return gpus


def nulls_of(sample: dict[str, Any]) -> set[str]:
    return {name for name, value in sample.items() if value is None}


@contextmanager
def process() -> Iterator[int]:
    """The pid of a running process: samples omit processes that do not exist."""
    running = subprocess.Popen(["sleep", "1000"])
    try:
        yield running.pid
    finally:
        running.kill()
        running.wait()
