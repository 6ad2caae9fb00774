"""Samples and process lists, with a library that simulates all failures of the real one."""

import os
import subprocess

import pytest

from tests.agent.nvml_children import (
    GPU_FAULTS,
    PASSING,
    SAMPLED,
    UNSUPPORTED,
    Ask,
    Standin,
    asked_once,
    asked_until,
    asking,
    gpus_of,
    nulls_of,
    samples_of,
)
from tests.testbed.nvml.standin import uuid_of

OLDER = {
    "nvmlDeviceGetMemoryInfo_v2": "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",
}
PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


def _nulls_become(ask: Ask, index: int, expected: set[str]) -> None:
    """Wait until exactly these values of GPU `index` are null; the samples of other GPUs are complete."""
    answer = asked_until(
        ask, "sample", lambda it: it["error"] is None and nulls_of(samples_of(it)[index]) == expected
    )
    assert all(not nulls_of(sample) for sample in samples_of(answer) if sample["index"] != index)


def test_all_values_of_a_sample(standin: Standin) -> None:
    sample = samples_of(asked_once(standin("gpus 1", "set 0 power_mw 256750"), "sample"))[0]
    at = sample.pop("sampled_at")
    assert len(at) == len("2026-11-21T12:00:00.000Z")
    assert at.endswith("Z")
    assert sample == {
        "uuid": uuid_of(0),
        "index": 0,
        "utilization_gpu_pct": 37,
        "utilization_memory_pct": 12,
        "memory_used_mib": 1024,
        "memory_total_mib": 81559,
        "power_w": 256.75,
        "power_limit_w": 700.0,
        "temperature_c": 41,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "fan_pct": 30,
        "energy_j": 987654.321,
        "processes": [],
        "mig_devices": [],
    }


@pytest.mark.parametrize("code", PASSING)
def test_a_transient_error_is_null_once(standin: Standin, code: int) -> None:
    nvml = standin("gpus 2")
    with asking(nvml) as ask:
        for function, fields in SAMPLED.items():
            nvml.write("gpus 2", f"error {function} {code} 1")
            _nulls_become(ask, 1, fields)
            nvml.write("gpus 2")
            _nulls_become(ask, 1, set())


@pytest.mark.parametrize("code", UNSUPPORTED)
def test_an_unsupported_value_is_null_and_not_read_again(standin: Standin, code: int) -> None:
    nvml = standin("gpus 2")
    nulls: set[str] = set()
    with asking(nvml) as ask:
        for function, fields in SAMPLED.items():
            older = [f"error {OLDER[function]} {code} 1"] if function in OLDER else []
            nvml.write("gpus 2", f"error {function} {code} 1", *older)
            nulls |= fields
            _nulls_become(ask, 1, nulls)
        nvml.write("gpus 2", "set 0 util 99")
        answer = asked_until(ask, "sample", lambda it: samples_of(it)[0]["utilization_gpu_pct"] == 99)
        assert nulls_of(samples_of(answer)[1]) == nulls


def test_an_unsupported_value_is_null_while_another_one_has_a_transient_error(standin: Standin) -> None:
    transient = f"error nvmlDeviceGetUtilizationRates {PASSING[0]} 1"
    unsupported = f"error nvmlDeviceGetTotalEnergyConsumption {UNSUPPORTED[0]} 1"
    nvml = standin("gpus 2", transient, unsupported)
    with asking(nvml) as ask:
        _nulls_become(ask, 1, {"utilization_gpu_pct", "utilization_memory_pct", "energy_j"})
        nvml.write("gpus 2", unsupported)
        _nulls_become(ask, 1, {"energy_j"})


@pytest.mark.parametrize("code", UNSUPPORTED)
def test_older_functions_are_the_fallback(standin: Standin, code: int) -> None:
    errors = [f"error {function} {code}" for function in (*OLDER, *PROCESSES)]
    pid = os.getpid()
    with asking(standin("gpus 1", f"process 0 compute {pid} 7", *errors)) as ask:
        for _ in range(2):
            sample = samples_of(ask("sample"))[0]
            assert not nulls_of(sample)
            assert sample["memory_total_mib"] == 81559
            assert [process["pid"] for process in sample["processes"]] == [pid]
        assert gpus_of(ask("inventory"))[0]["memory_mib"] == 81559


def test_an_old_library_without_new_functions_is_read(standin: Standin) -> None:
    missing = [*OLDER, *PROCESSES, "nvmlDeviceGetMigMode", "nvmlDeviceGetTotalEnergyConsumption"]
    missing += ["nvmlDeviceGetFieldValues", "nvmlEventSetWait_v2", "nvmlDeviceGetMemoryAffinity"]
    with asking(standin("gpus 2", f"process 1 compute {os.getpid()} 7", without=missing)) as ask:
        gpus = gpus_of(ask("inventory"))
        assert [(gpu["memory_mib"], gpu["mig_mode"]) for gpu in gpus] == [(81559, None)] * 2
        samples = samples_of(ask("sample"))
        assert [nulls_of(sample) for sample in samples] == [{"energy_j"}] * 2
        assert [process["pid"] for process in samples[1]["processes"]] == [os.getpid()]


def test_without_any_process_list_only_the_processes_are_null(standin: Standin) -> None:
    missing = [name.replace("_v3", version) for name in PROCESSES for version in ("_v2", "_v3")]
    [sample] = samples_of(asked_once(standin("gpus 1", without=missing), "sample"))
    assert nulls_of(sample) == {"processes"}


@pytest.mark.parametrize(("number", "code"), GPU_FAULTS.items())
def test_a_gpu_with_a_fault_has_a_null_sample_and_others_are_read(
    standin: Standin, number: int, code: str
) -> None:
    nvml = standin("gpus 3")
    with asking(nvml) as ask:
        for function in (*SAMPLED, *PROCESSES):
            nvml.write("gpus 3", f"error {function} {number} 1")
            answer = asked_until(ask, "sample", lambda it: it["answer"]["faults"])
            assert answer["answer"]["faults"] == {uuid_of(1): code}
            null_counts = [len(nulls_of(sample)) for sample in samples_of(answer)]
            assert null_counts == [0, 12, 0]
            nvml.write("gpus 3")
            asked_until(ask, "sample", lambda it: not it["answer"]["faults"])


def test_the_inventory_has_the_faults_of_the_last_samples(standin: Standin) -> None:
    with asking(standin("gpus 2", "error nvmlDeviceGetPowerUsage 15 1")) as ask:
        ask("sample")
        assert [gpu["fault"] for gpu in gpus_of(ask("inventory"))] == [None, "gpu_lost"]


# Processes


def test_existing_processes_are_listed_once(standin: Standin) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own, parent = os.getpid(), os.getppid()
    nvml = standin(
        "gpus 1",
        *[f"process 0 compute {pid} 100" for pid in (own, 0, -1, ended.pid, 2_000_000_000)],
        f"process 0 graphics {own} 100",
        f"process 0 graphics {parent} -1",
        f"process_name {own} /usr/bin/py\\xff",
    )
    assert samples_of(asked_once(nvml, "sample"))[0]["processes"] == [
        {"pid": own, "name": "/usr/bin/py�", "memory_used_mib": 100, "mig_uuid": None},
        {"pid": parent, "name": None, "memory_used_mib": None, "mig_uuid": None},
    ]


def test_an_unreadable_list_is_null_and_an_empty_one_is_empty(standin: Standin) -> None:
    nvml = standin("gpus 2", *[f"error {function} 4 1" for function in PROCESSES])
    assert [sample["processes"] for sample in samples_of(asked_once(nvml, "sample"))] == [[], None]
