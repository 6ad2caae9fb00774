"""Shares of GPUs: devices and environment, which instances may share a GPU, and its release."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.device_claims import Devices, Share, claims, devices_of
from mooring.agent.decide.reconcile import Release, Start
from mooring.agent.decide.snapshot import ActionKind, Key, Work
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config, spec_hash
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.gpus.reader import NvmlGpuReader
from mooring.agent.gpus.release import ReleaseGate
from mooring.agent.runtime import Container
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent import Assignment
from tests.agent.agents import agent_with
from tests.agent.builders import assignment as simulated_assignment
from tests.agent.builders import container, decided, exited, wanted
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    output_of,
    runtime_on,
    start,
    with_more,
)
from tests.agent.grants import GPU, MIG_A, with_gpus, with_mig, with_share
from tests.agent.nvml_children import process
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

A: Key = ("a", 1)
IMAGE = Image(id="sha256:1", digest="sha256:2")
SHARE = Share("shared", 250, 20_000, "prj_1")
SHARE_OF_OTHER_PROJECT = Share("shared", 250, 20_000, "prj_2")


# --- assignments


def test_without_grants_an_assignment_has_whole_gpus() -> None:
    assert devices_of(assignment(gpu_uuids=("GPU-a", "GPU-b"))) == Devices(("GPU-a", "GPU-b"))
    assert devices_of(assignment()) == Devices()


def test_whole_gpus_are_equal_with_and_without_grants() -> None:
    """Containers of earlier agents are adopted by this hash."""
    old = assignment(gpu_uuids=(GPU, uuid_of(1)))
    new = with_gpus(old, GPU, uuid_of(1))
    assert devices_of(old) == devices_of(new)
    assert spec_hash(old) == spec_hash(new)
    configs = [
        container_config(one, IMAGE, Abilities(), ContainerLimits(), CONTROL_PLANE) for one in (old, new)
    ]
    assert configs[0] == configs[1]


def test_each_different_share_has_its_own_spec_hash() -> None:
    one = with_share(assignment(), 20_000)
    others = [
        with_share(one, 20_001),
        with_share(one, milli=251),
        with_share(one, isolation="mps"),
        with_share(one, gpu=uuid_of(1)),
        with_gpus(one, GPU),
        with_mig(one, MIG_A),
    ]
    assert len({spec_hash(each) for each in (one, *others)}) == 7


def test_an_invalid_share_means_whole_gpus() -> None:
    two_gpus = with_gpus(assignment(), GPU, uuid_of(1)).model_copy(update={"isolation": "shared"})
    assert devices_of(two_gpus) == Devices((GPU, uuid_of(1)))
    assert set(claims(devices_of(two_gpus)).values()) == {None}


# --- with a real engine


def test_a_share_is_recovered_from_its_assignment(node: DockerNode, runtime: DockerRuntime) -> None:
    assigned = with_share(assignment(), 20_000)
    made = start(runtime, assigned)
    assert made.share == Share("shared", 250, 20_000, "proj-1")
    assert (made.gpu_uuids, made.parent_gpus) == ((GPU,), ())
    with closing(runtime_on(node)) as another:
        another.assigned([assigned])  # this runtime has no record of the container
        assert another.containers() == ([made], [])
        assert start(another, assigned).container_id == made.container_id
        mounts = output_of(another, made, ["cat", "/proc/mounts"])
    assert "/dev/shm" in mounts and GPU not in mounts  # nothing is mounted for the share


# --- which instances may share a GPU


def started(*items: Any, **more: Any) -> set[str]:
    """Return the instances that a plan for this node starts."""
    plan = decided(*items, **more)
    return {action.assignment.instance_id for action in plan.actions if isinstance(action, Start)}


def wanted_share(instance_id: str, project_id: str = "prj_1") -> Assignment:
    return with_more(with_share(wanted(instance_id)), project_id=project_id)


def test_instances_of_one_project_share_a_gpu() -> None:
    assert started(wanted_share("a"), wanted_share("b")) == {"a", "b"}
    assert started(wanted_share("b"), container("c", gpu_uuids=(GPU,), share=SHARE)) == {"b"}


def test_instances_of_two_projects_do_not_share_a_gpu() -> None:
    assert started(wanted_share("a"), wanted_share("b", project_id="prj_2")) == {"a"}


@pytest.mark.parametrize(
    "holder",
    [
        container("c", gpu_uuids=(GPU,)),  # the whole GPU
        container("c", gpu_uuids=(GPU,), share=SHARE_OF_OTHER_PROJECT),  # R12
        container("c", gpu_uuids=(MIG_A,), parent_gpus=(GPU,)),  # a MIG device of the GPU
    ],
)
def test_a_share_waits_for_claims_that_exclude_it(holder: Container) -> None:
    plan = decided(wanted_share("a"), holder)
    assert plan.actions == ()
    assert plan.waiting[A].code == "waiting_for_removal" and GPU in plan.waiting[A].message


def test_a_whole_gpu_waits_for_every_part_of_it() -> None:
    whole = with_gpus(wanted("a"), GPU)
    for part in (
        container("c", gpu_uuids=(GPU,), share=SHARE),
        container("c", gpu_uuids=(MIG_A,), parent_gpus=(GPU,)),
        exited("c", gpu_uuids=(GPU,), share=SHARE),
    ):
        unreleased = {("c", 1): part} if part.status == "exited" else {}
        assert started(whole, part, unreleased=unreleased) == set()


# --- release

ENDED = exited("a", gpu_uuids=(GPU,), share=SHARE)
NEIGHBOUR = container("b", gpu_uuids=(GPU,), share=SHARE)


def releases(*items: Any, **more: Any) -> list[Release]:
    plan = decided(*items, unreleased={A: ENDED}, **more)
    return [action for action in plan.actions if isinstance(action, Release)]


def test_the_last_share_of_a_gpu_releases_the_whole_gpu() -> None:
    assert releases(ENDED, NEIGHBOUR) == [Release(ENDED, (), (GPU,))]
    assert releases(ENDED) == [Release(ENDED, (GPU,), ())]
    starting = {("b", 1): Work(ActionKind.START, (GPU,), share=SHARE)}
    assert releases(ENDED, work=starting) == [Release(ENDED, (), (GPU,))]
    other_release = {("b", 1): Work(ActionKind.RELEASE)}  # of another ended share
    assert releases(ENDED, work=other_release) == [Release(ENDED, (GPU,), ())]


def test_a_new_share_waits_while_the_whole_gpu_is_released() -> None:
    """Otherwise its new processes would count as leftovers of the other share."""
    assert started(wanted_share("b"), ENDED, unreleased={A: ENDED}) == set()
    releasing = {A: Work(ActionKind.RELEASE, (GPU,))}
    assert started(wanted_share("b"), ENDED, work=releasing, unreleased={A: ENDED}) == set()
    assert started(wanted_share("c"), ENDED, NEIGHBOUR, unreleased={A: ENDED}) == {"c"}


def gpu_processes(reader: NvmlGpuReader) -> set[tuple[int, int | None]]:
    """Return the pids of the processes on the GPU, with their memory."""
    reading = reader.fresh(5)
    processes = (reading.samples[0]["processes"] if reading else None) or []
    assert len({one["pid"] for one in processes}) == len(processes)
    return {(one["pid"], one["memory_used_mib"]) for one in processes}


def test_neighbours_do_not_delay_the_release_of_a_share(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as own, process() as neighbours:
        containers = {own: ENDED.container_id, neighbours: NEIGHBOUR.container_id}
        gate = ReleaseGate(reader, containers.get, within_s=0.3)
        gate.learn(reader.latest(), in_use=())
        gate.note_start([GPU])
        with_neighbour = ["gpus 1", "set 0 used_mib 40000", f"process 0 compute {neighbours} 30000"]
        nvml.write(*with_neighbour)
        assert gate.wait(ENDED, [], [GPU]) == {}
        nvml.write(*with_neighbour, f"process 0 compute {own} 100")
        wait_until(lambda: gpu_processes(reader) == {(own, 100), (neighbours, 30_000)})
        busy = gate.wait(ENDED, [], [GPU])
        assert f"{own} (" in busy[GPU] and f"{neighbours} (" not in busy[GPU]
        # When the last share ends, no process may be left.
        assert f"{neighbours} (" in gate.wait(ENDED, [GPU])[GPU]


def test_the_memory_is_checked_after_the_last_share(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=0.3)
    gate.learn(reader.latest(), in_use=())
    gate.note_start([GPU])
    nvml.write("gpus 1", "set 0 used_mib 40000")
    assert gate.wait(ENDED, [], [GPU]) == {}
    assert "40000 MiB of its memory are still in use" in gate.wait(ENDED, [GPU])[GPU]


def test_clients_of_mps_are_listed_once(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as client, process() as both:
        lines = [f"process 0 mps {client} 300", f"process 0 compute {both} 200", f"process 0 mps {both} 200"]
        nvml.write("gpus 1", *lines)
        wait_until(lambda: gpu_processes(reader) == {(client, 300), (both, 200)})


def test_a_process_that_came_with_the_first_share_delays_the_release_of_the_last(
    nvml: NvmlStandin, reader: NvmlGpuReader, tmp_path: Path
) -> None:
    """The process was there before the second share started, but not before the first."""
    first, second = with_share(simulated_assignment()), with_share(simulated_assignment())
    with (
        process() as left,
        agent_with(SimulatedRuntime(start_s=0), reader, lambda _: None, tmp_path) as server,
    ):
        server.wants(first)
        wait_until(lambda: server.phase(first) == "running")
        nvml.write("gpus 1", "set 0 used_mib 5", f"process 0 compute {left} 100")
        wait_until(lambda: gpu_processes(reader) == {(left, 100)})
        server.wants(first, second)
        wait_until(lambda: server.phase(second) == "running")
        server.wants(stopped(first), second)
        wait_until(lambda: server.phase(first) == "exited")
        # Until the second share has ended too, the process may belong to it.
        assert not any(report.incidents for _, report in server.reports)
        server.wants(stopped(second))
        wait_until(lambda: server.phase(second) == "exited", timeout_s=10)
        [incident] = {one.id: one for _, report in server.reports for one in report.incidents}.values()
        assert incident.uuid == GPU and f"{left} (" in incident.message


def stopped(assigned: Assignment) -> Assignment:
    return assigned.model_copy(update={"want": "stopped", "may_start": False})
