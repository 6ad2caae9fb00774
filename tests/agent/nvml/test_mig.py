"""MIG devices: read by the real binding, requested by UUID, and released when nothing is left on them."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.device_claims import devices_of, physical_gpu
from mooring.agent.decide.reconcile import Release, Start
from mooring.agent.decide.snapshot import Key
from mooring.agent.docker.create import Abilities, Image, device_requests, environment
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.docker.verify import foreign_devices, mismatch
from mooring.agent.gpus.reader import NvmlGpuReader
from mooring.agent.gpus.release import ReleaseGate
from mooring.agent.main import _minor_of
from mooring.agent.nvml.types import NvmlSample
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.core.gpu import GpuFacts
from mooring.core.simulation import SimulatedFleet, parse_fleet, parse_fleets
from mooring.schemas.agent import Incident
from mooring_client.schemas.gpus import Sample, mig_milli
from tests.agent.agents import agent_with
from tests.agent.builders import assignment as simulated_assignment
from tests.agent.builders import container, decided, exited, pull_and_start, wanted
from tests.agent.control_planes import TinyControlPlane
from tests.agent.docker_assignments import assignment, output_of, runtime_on, start, with_more
from tests.agent.grants import GPU, MIG_A, MIG_B, with_gpus, with_mig
from tests.agent.nvml_children import (
    SELDOM,
    Standin,
    asked_once,
    asked_until,
    asking,
    gpus_of,
    nulls_of,
    process,
    samples_of,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until

A: Key = ("a", 1)
NAME = "NVIDIA H100 80GB HBM3 MIG"
ONE_DEVICE = ("gpus 2", "set 0 mig 1", f"slice 0 {MIG_A} 9728 {NAME} 1g.10gb")
TWO_DEVICES = (
    *ONE_DEVICE,
    f"slice 0 {MIG_B} 40192 {NAME} 3g.40gb",
    "error nvmlDeviceGetUtilizationRates 3 0",
)


# --- what NVML reports


@pytest.mark.parametrize(
    ("name", "parts", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, "1g.5gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", None, "1g.5gb+me"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", None, "1c.3g.40gb"),
        ("MIG 1g.10gb", None, None),  # not a form of name that NVIDIA uses
        ("", (1, 1), "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", (3, 3), "3g.10gb"),
        ("NVIDIA H100 80GB HBM3", (3, 1), "1c.3g.10gb"),
        ("NVIDIA H100 80GB HBM3", None, None),
    ],
)
def test_the_profile_is_from_the_name_or_the_slices(
    standin: Standin, name: str, parts: tuple[int, int] | None, profile: str | None
) -> None:
    slices = [f"slice_parts 0 0 {parts[0]} {parts[1]}"] if parts else []
    nvml = standin("gpus 1", "set 0 mig 1", f"slice 0 {MIG_A} 9728 {name}", *slices)
    [gpu] = gpus_of(asked_once(nvml, "inventory"))
    assert [device["profile"] for device in gpu["mig_devices"]] == ([profile] if profile else [])


@pytest.mark.parametrize(
    ("memory_mib", "gpu_mib", "profile"),
    [
        (9728, 81_559, "1g.10gb"),
        (4864, 40_536, "1g.5gb"),
        (40_192, 81_559, "1g.40gb"),
        (20_096, 40_536, "1g.20gb"),
        (24_125, 24_576, "1g.24gb"),
        (16_384, 143_771, "1g.18gb"),
    ],
)
def test_the_memory_of_a_profile_is_rounded_like_nvidias_tools(
    standin: Standin, memory_mib: int, gpu_mib: int, profile: str
) -> None:
    nvml = standin(
        "gpus 1",
        "set 0 mig 1",
        f"set 0 memory_mib {gpu_mib}",
        f"slice 0 {MIG_A} {memory_mib} x",
        "slice_parts 0 0 1 1",
    )
    assert gpus_of(asked_once(nvml, "inventory"))[0]["mig_devices"][0]["profile"] == profile


def test_samples_have_the_memory_and_the_processes_of_each_device(standin: Standin) -> None:
    with process() as one, process() as other:
        used = [f"slice_process 0 0 {one} 700", f"slice_process 0 1 {other} 900", "slice_used 0 1 950"]
        with asking(standin(*TWO_DEVICES, *used)) as ask:
            ask("inventory")
            mig_gpu, whole_gpu = samples_of(ask("sample"))
    assert nulls_of(mig_gpu) == {"utilization_gpu_pct", "utilization_memory_pct"}
    assert mig_gpu["mig_devices"] == [
        {"uuid": MIG_A, "memory_used_mib": 0, "memory_total_mib": 9728},
        {"uuid": MIG_B, "memory_used_mib": 950, "memory_total_mib": 40_192},
    ]
    assert [(each["pid"], each["memory_used_mib"], each["mig_uuid"]) for each in mig_gpu["processes"]] == [
        (one, 700, MIG_A),
        (other, 900, MIG_B),
    ]
    assert (whole_gpu["mig_devices"], whole_gpu["processes"]) == ([], [])


def test_unknown_processes_are_null(standin: Standin) -> None:
    lists = [f"nvmlDeviceGetComputeRunningProcesses_v{version}" for version in (2, 3)]
    with asking(standin(*TWO_DEVICES, *(f"error {function} 4" for function in lists))) as ask:
        ask("inventory")
        assert samples_of(ask("sample"))[0]["processes"] is None


def test_unreadable_devices_are_still_listed_and_removed_ones_are_not(standin: Standin) -> None:
    nvml = standin(*TWO_DEVICES)
    with asking(nvml) as ask:
        before = gpus_of(ask("inventory"))[0]["mig_devices"]
        # The power limit shows when the new configuration is in effect.
        nvml.write(*TWO_DEVICES, "error nvmlDeviceGetMigDeviceHandleByIndex 999", "set 1 limit_mw 1000")
        answer = asked_until(ask, "inventory", lambda it: gpus_of(it)[1]["power_limit_w"] == 1)
        assert gpus_of(answer)[0]["mig_devices"] == before
        nvml.write(*ONE_DEVICE)
        asked_until(
            ask, "inventory", lambda it: [one["uuid"] for one in gpus_of(it)[0]["mig_devices"]] == [MIG_A]
        )


@pytest.mark.parametrize(
    ("profile", "milli"), [("1g.10gb", 142), ("7g.80gb", 1000), ("1c.3g.40gb", 142), ("unknown", 1000)]
)
def test_the_share_of_a_device_in_its_gpu(profile: str, milli: int) -> None:
    assert mig_milli(profile) == milli


# --- devices of a container

ONE = with_mig(assignment(), MIG_A)
TWO = with_mig(assignment(), MIG_A, MIG_B)
CDI = Abilities(cdi_devices=frozenset({f"nvidia.com/gpu={MIG_A}", f"nvidia.com/gpu={GPU}"}))


def test_devices_are_requested_by_uuid() -> None:
    devices = devices_of(TWO)
    assert (devices.gpu_uuids, devices.parent_gpus) == ((MIG_A, MIG_B), (GPU, GPU))
    [request] = device_requests(devices.gpu_uuids, Abilities())
    assert (request["Driver"], request["DeviceIDs"]) == ("nvidia", [MIG_A, MIG_B])
    assert f"NVIDIA_VISIBLE_DEVICES={MIG_A},{MIG_B}" in environment(TWO, Image("1", None), Abilities())
    assert physical_gpu(devices, MIG_B) == GPU


def test_devices_are_requested_by_cdi_if_it_offers_all_of_them() -> None:
    [request] = device_requests(devices_of(ONE).gpu_uuids, CDI)
    assert (request["Driver"], request["DeviceIDs"]) == ("cdi", [f"nvidia.com/gpu={MIG_A}"])
    assert "NVIDIA_VISIBLE_DEVICES=void" in environment(ONE, Image("1", None), CDI)
    [request] = device_requests(devices_of(TWO).gpu_uuids, CDI)
    assert request["Driver"] == "nvidia"


def test_a_real_container_has_the_device_and_is_adopted(node: DockerNode, runtime: DockerRuntime) -> None:
    made = start(runtime, ONE)
    inspected: Any = node.client.api.inspect_container(made.container_id)
    labels = inspected["Config"]["Labels"]
    assert (labels["mooring.gpus"], labels["mooring.cards"]) == (MIG_A, GPU)
    assert f"NVIDIA_VISIBLE_DEVICES={MIG_A}" in output_of(runtime, made, ["env"]).splitlines()
    assert mismatch(inspected, [MIG_A], simulated=False) is None
    for others in ([MIG_B], [GPU], [MIG_A, MIG_B]):
        reason = mismatch(inspected, others, simulated=False)
        assert reason is not None and reason.code == "gpu_mismatch"
    with closing(runtime_on(node, parent_of={MIG_A: GPU}.get)) as another:
        [found], _ = another.containers()
        assert (found.gpu_uuids, found.parent_gpus, found.share) == ((MIG_A,), (GPU,), None)


def test_the_gpu_seen_inside_is_the_parent_of_the_device(standin: Standin) -> None:
    nvml = standin(*TWO_DEVICES, "set 0 minor 4")
    with closing(NvmlGpuReader(SELDOM, nvml.environment)) as reader:
        assert reader.wait_first(10)
        assert foreign_devices({4}, [MIG_A, MIG_B], lambda uuid: _minor_of(reader, uuid)) is None
        assert foreign_devices({1}, [MIG_A], lambda uuid: _minor_of(reader, uuid)) is not None


# --- exclusive claims


def started(*items: Any) -> set[str]:
    """Return the instances that a plan for this node starts."""
    actions = decided(*items).actions
    return {action.assignment.instance_id for action in actions if isinstance(action, Start)}


def test_a_gpu_and_a_device_of_it_are_never_both_allocated() -> None:
    on_device = container("c", gpu_uuids=(MIG_A,), parent_gpus=(GPU,))
    assert started(with_gpus(wanted("a"), GPU), on_device) == set()
    assert started(with_mig(wanted("a"), MIG_A), container("c", gpu_uuids=(GPU,))) == set()
    assert started(with_mig(wanted("a"), MIG_A), on_device) == set()


@pytest.mark.parametrize("project_id", ["prj_1", "prj_2"])
def test_devices_of_one_gpu_are_allocated_to_any_projects(project_id: str) -> None:
    on_device = container("c", gpu_uuids=(MIG_A,), parent_gpus=(GPU,), project_id="prj_1")
    other_device = with_mig(with_more(wanted("a"), project_id=project_id), MIG_B)
    assert started(other_device, on_device) == {"a"}


# --- release

ENDED = exited("a", gpu_uuids=(MIG_A,), parent_gpus=(GPU,))


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    return NvmlStandin(tmp_path, *TWO_DEVICES)


def test_other_devices_do_not_delay_a_release(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=0.3)
    gate.learn(reader.latest(), in_use=())
    gate.note_start([MIG_A])
    with process() as neighbour:
        nvml.write(
            *TWO_DEVICES,
            "set 0 used_mib 40000",
            "slice_used 0 1 30000",
            f"slice_process 0 1 {neighbour} 30000",
        )
        assert gate.wait(ENDED, [MIG_A]) == {}


def fresh_sample(reader: NvmlGpuReader) -> NvmlSample:
    return (reader.fresh(5) or reader.latest()).samples[0]


def test_a_process_on_a_device_delays_its_release(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=0.3)
    gate.learn(reader.latest(), in_use=())
    gate.note_start([MIG_A])
    with process() as left:
        nvml.write(*TWO_DEVICES, f"slice_process 0 0 {left} 100")
        wait_until(lambda: fresh_sample(reader)["processes"])
        assert f"{left} (" in gate.wait(ENDED, [MIG_A])[MIG_A]


def test_memory_in_use_on_a_device_delays_its_release(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=0.3)
    gate.learn(reader.latest(), in_use=[MIG_B])
    nvml.write(*TWO_DEVICES, "slice_used 0 0 5000")
    wait_until(lambda: fresh_sample(reader)["mig_devices"][0]["memory_used_mib"])
    assert "5000 MiB of its memory" in gate.wait(ENDED, [MIG_A])[MIG_A]


def test_the_release_of_a_device_does_not_wait_for_its_gpu() -> None:
    neighbour = container("b", gpu_uuids=(MIG_B,), parent_gpus=(GPU,))
    [release] = decided(ENDED, neighbour, unreleased={A: ENDED}).actions
    assert release == Release(ENDED, (MIG_A,), ())


def test_the_incident_of_a_device_names_its_gpu(
    nvml: NvmlStandin, reader: NvmlGpuReader, tmp_path: Path
) -> None:
    """A quarantine concerns the GPU: none of its devices is allocated until it is cleared."""
    assigned = with_mig(simulated_assignment(), MIG_A)
    with (
        process() as left,
        agent_with(SimulatedRuntime(start_s=0), reader, lambda _: None, tmp_path) as server,
    ):
        server.wants(assigned)
        wait_until(lambda: server.phase(assigned) == "running")
        nvml.write(*TWO_DEVICES, f"slice_process 0 0 {left} 100")
        server.wants(assigned.model_copy(update={"want": "stopped", "may_start": False}))
        wait_until(lambda: server.phase(assigned) == "exited")
        assert {incident.uuid for incident in incidents(server)} == {GPU}


def incidents(server: TinyControlPlane) -> list[Incident]:
    return [incident for _, report in server.reports for incident in report.incidents]


# --- without hardware


@pytest.mark.parametrize(
    ("text", "fleet"),
    [
        ("1x2xA100:mps", SimulatedFleet(1, 2, "A100", mps=True)),
        (
            "1x2xA100:mig=3g.40gb+2g.20gb+1g.10gb",
            SimulatedFleet(1, 2, "A100", mig=("3g.40gb", "2g.20gb", "1g.10gb")),
        ),
        ("1x1xH100:mig=1g.10gb+me+1g.10gb", SimulatedFleet(1, 1, "H100", mig=("1g.10gb+me", "1g.10gb"))),
    ],
)
def test_simulated_fleets_with_mig(text: str, fleet: SimulatedFleet) -> None:
    assert parse_fleet(text) == fleet
    assert parse_fleets(f"2x8xH100,{text}") == (SimulatedFleet(2, 8, "H100"), fleet)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1x1xA100:", "is neither mps nor mig="),
        ("1x1xA100:fast", "is neither mps nor mig="),
        ("1x1xA100:mig=", "MIG profiles are like"),
        ("1x1xA100:mig=3g", "MIG profiles are like"),
        ("1x1xT4:mig=1g.5gb", "has no MIG devices"),
        ("1x1xA100:mig=4g.40gb+4g.40gb", "more than a GPU has"),
        ("1x1xA100:mig=1g.80gb+1g.20gb", "more than a GPU has"),
    ],
)
def test_invalid_simulated_fleets(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fleet(text)


def test_a_simulated_device_is_busy_with_its_own_instance_only() -> None:
    runtime = SimulatedRuntime(start_s=0, mps=True)
    reader = SimulatedGpuReader("n", 2, "A100", users=runtime.gpu_users, mig=("3g.40gb", "1g.10gb"))
    gpus = [GpuFacts.model_validate(gpu, extra="forbid") for gpu in reader.latest().inventory or ()]
    assert [[one.profile for one in gpu.mig_devices] for gpu in gpus] == [["3g.40gb", "1g.10gb"]] * 2
    assert len({one.uuid for gpu in gpus for one in gpu.mig_devices}) == 4
    assert {gpu.mig_mode for gpu in gpus} == {"enabled"}
    small = gpus[1].mig_devices[1].uuid
    made = pull_and_start(runtime, with_mig(simulated_assignment(), small, gpu=gpus[1].uuid))
    assert made is not None and made.parent_gpus == (gpus[1].uuid,)
    idle, busy = (Sample.model_validate(one, extra="forbid") for one in reader.latest().samples)
    assert (idle.processes, idle.memory_used_mib, idle.utilization_gpu_pct) == ([], 0, None)
    assert [(one.mig_uuid, reader.container_of(one.pid)) for one in busy.processes or ()] == [
        (small, made.container_id)
    ]
    assert [bool(one.memory_used_mib) for one in busy.mig_devices] == [False, True]
    assert runtime.facts().mps
