"""Simulated GPUs are stable across starts, busy while in use, and valid for the protocol."""

import pytest

from mooring.agent.gpus.reader import GpuReader
from mooring.agent.simulated.gpus import PID_MAX, GpuUser, SimulatedGpuReader, gpu_uuid
from mooring.core.gpu import GpuFacts
from mooring.core.simulation import MODELS
from mooring_client.schemas.gpus import Sample

NOON = 1_800_000_000.0


def _reader(model: str = "H100", *, busy: bool = False, count: int = 8, at: float = NOON) -> GpuReader:
    users = [GpuUser("c")] if busy else []
    return SimulatedGpuReader("gpu-1", count, model, users=lambda _: users, clock=lambda: at)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("busy", [False, True])
def test_facts_and_samples_match_the_protocol(model: str, busy: bool) -> None:
    reading = _reader(model, busy=busy).latest()
    facts = [GpuFacts.model_validate(gpu, extra="forbid") for gpu in reading.inventory or ()]
    samples = [Sample.model_validate(sample, extra="forbid") for sample in reading.samples]
    assert [gpu.model for gpu in facts] == [MODELS[model].name] * 8
    assert [sample.uuid for sample in samples] == [gpu.uuid for gpu in facts]
    assert reading.simulated
    assert reading.error is None


def test_gpus_are_stable_per_node_and_differ_between_nodes() -> None:
    assert _reader().latest().inventory == _reader().latest().inventory
    assert gpu_uuid("gpu-1", 0) != gpu_uuid("gpu-2", 0)
    assert len({gpu_uuid("gpu-1", index) for index in range(16)}) == 16


def test_a_sample_is_a_function_of_time() -> None:
    assert _reader(busy=True).latest().samples == _reader(busy=True).latest().samples
    assert _reader(busy=True).latest().samples != _reader(busy=True, at=NOON + 3).latest().samples


def test_only_a_gpu_in_use_is_busy() -> None:
    held = gpu_uuid("gpu-1", 3)
    reader = SimulatedGpuReader(
        "gpu-1", 8, "H100", users=lambda uuid: [GpuUser("c")] if uuid == held else [], clock=lambda: NOON
    )
    for sample in reader.latest().samples:
        used, utilization = sample["memory_used_mib"], sample["utilization_gpu_pct"]
        assert used is not None
        assert utilization is not None
        assert bool(sample["processes"]) == (sample["uuid"] == held)
        assert (used > 0) == (utilization > 50) == (sample["uuid"] == held)


@pytest.mark.parametrize("second", range(0, 600, 7))
def test_samples_stay_within_the_limits_of_the_model(second: int) -> None:
    for sample in _reader(busy=True, at=NOON + second).latest().samples:
        assert 70 <= (sample["power_w"] or 0) <= 700
        assert 0 <= (sample["utilization_gpu_pct"] or 0) <= 100
        assert 0 <= (sample["memory_used_mib"] or 0) <= 81_559
        assert 20 <= (sample["temperature_c"] or 0) <= 85


def test_the_energy_counter_only_rises() -> None:
    first, later = (_reader(at=NOON + s).latest().samples[0]["energy_j"] for s in (0, 60))
    assert 0 < (first or 0) < (later or 0)


def test_simulated_process_ids_do_not_exist() -> None:
    samples = _reader(busy=True).latest().samples
    assert all(process["pid"] >= PID_MAX for sample in samples for process in sample["processes"] or [])


@pytest.mark.parametrize(("model", "links"), [("H100", 18), ("H200", 18), ("A100", 12), ("B200", 18)])
def test_a_switch_connects_every_pair(model: str, links: int) -> None:
    for gpu in _reader(model).latest().inventory or ():
        assert [peer["links"] for peer in gpu["nvlink_peers"]] == [links] * 7


def test_the_v100_mesh_has_six_lanes_each_and_is_mutual() -> None:
    gpus = _reader("V100").latest().inventory or ()
    lanes = {(gpu["uuid"], peer["uuid"]): peer["links"] for gpu in gpus for peer in gpu["nvlink_peers"]}
    assert all(lanes[b, a] == links for (a, b), links in lanes.items())
    assert all(sum(peer["links"] for peer in gpu["nvlink_peers"]) == 6 for gpu in gpus)
    assert all(len(gpu["nvlink_peers"]) == 4 for gpu in gpus)


@pytest.mark.parametrize("model", ["L40S", "L4", "A10", "T4", "RTX 4090"])
def test_other_models_are_connected_by_pcie_only(model: str) -> None:
    gpus = _reader(model).latest().inventory or ()
    assert all(gpu["nvlink_peers"] == [] for gpu in gpus)
    assert {level for gpu in gpus for level in gpu["topology"].values()} == {"node", "system"}


@pytest.mark.parametrize("count", [0, 1, 3, 16])
def test_any_number_of_gpus_is_simulated(count: int) -> None:
    reading = _reader("V100", count=count, busy=True).latest()
    assert len(reading.inventory or ()) == len(reading.samples) == count


def test_missing_features_of_a_model_are_null() -> None:
    assert _reader("H100").latest().samples[0]["fan_pct"] is None
    assert _reader("RTX 4090", busy=True).latest().samples[0]["fan_pct"]
    assert (_reader("T4").latest().inventory or ())[0]["mig_mode"] is None


def test_the_first_reading_is_available_at_once_and_after_close() -> None:
    reader = _reader()
    assert reader.wait_first(0)
    reader.close()
    assert reader.latest().inventory
