"""Shares of GPUs: devices and environment, who may share a GPU, and when it is released."""

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
from tests.agent.builders import assignment as simulated
from tests.agent.builders import container, decided, exited, wanted
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    output_of,
    runtime_on,
    start,
    with_more,
)
from tests.agent.grants import CARD, MIG_A, with_cards, with_mig, with_share
from tests.agent.nvml_children import process
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

A: Key = ("a", 1)
IMAGE = Image(id="sha256:1", digest="sha256:2")
HERE = Share("shared", 250, 20_000, "prj_1")
ELSEWHERE = Share("shared", 250, 20_000, "prj_2")


# --- what an assignment says


def test_an_assignment_without_grants_has_whole_gpus() -> None:
    assert devices_of(assignment(gpu_uuids=("GPU-a", "GPU-b"))) == Devices(("GPU-a", "GPU-b"))
    assert devices_of(assignment()) == Devices()


def test_whole_gpus_are_the_same_with_grants_and_without() -> None:
    """A container that an agent of before has made is adopted by its hash."""
    old = assignment(gpu_uuids=(CARD, uuid_of(1)))
    new = with_cards(old, CARD, uuid_of(1))
    assert devices_of(old) == devices_of(new)
    assert spec_hash(old) == spec_hash(new)
    configs = [
        container_config(one, IMAGE, Abilities(), ContainerLimits(), CONTROL_PLANE) for one in (old, new)
    ]
    assert configs[0] == configs[1]


def test_another_share_is_another_container() -> None:
    one = with_share(assignment(), 20_000)
    others = [
        with_share(one, 20_001),
        with_share(one, milli=251),
        with_share(one, isolation="mps"),
        with_share(one, card=uuid_of(1)),
        with_cards(one, CARD),
        with_mig(one, MIG_A),
    ]
    assert len({spec_hash(each) for each in (one, *others)}) == 7


def test_an_invalid_share_is_whole_gpus() -> None:
    both = with_cards(assignment(), CARD, uuid_of(1)).model_copy(update={"isolation": "shared"})
    assert devices_of(both) == Devices((CARD, uuid_of(1)))
    assert set(claims(devices_of(both)).values()) == {None}


# --- with a real engine


def test_a_share_is_recovered_from_its_assignment(node: DockerNode, runtime: DockerRuntime) -> None:
    asked = with_share(assignment(), 20_000)
    made = start(runtime, asked)
    assert made.share == Share("shared", 250, 20_000, "proj-1")
    assert (made.gpu_uuids, made.parent_gpus) == ((CARD,), ())
    with closing(runtime_on(node)) as another:
        another.assigned([asked])  # it has no record of it
        assert another.containers() == ([made], [])
        assert start(another, asked).container_id == made.container_id
        inside = output_of(another, made, ["cat", "/proc/mounts"])
    assert "/dev/shm" in inside and str(CARD) not in inside


# --- who may have a card together


def started(*things: Any, **more: Any) -> set[str]:
    plan = decided(*things, **more)
    return {action.assignment.instance_id for action in plan.actions if isinstance(action, Start)}


def in_project(project_id: str, given: Assignment) -> Assignment:
    return with_more(given, project_id=project_id)


def shares(instance_id: str) -> Assignment:
    return with_share(wanted(instance_id))


def test_instances_of_one_project_share_a_gpu() -> None:
    assert started(shares("a"), shares("b")) == {"a", "b"}
    assert started(shares("b"), container("c", gpu_uuids=(CARD,), share=HERE)) == {"b"}


@pytest.mark.parametrize(
    "holder",
    [
        container("c", gpu_uuids=(CARD,)),  # the whole of it
        container("c", gpu_uuids=(CARD,), share=ELSEWHERE),  # R12
        container("c", gpu_uuids=(MIG_A,), parent_gpus=(CARD,)),  # a part of it
    ],
)
def test_a_share_waits_for_claims_that_exclude_it(holder: Container) -> None:
    plan = decided(shares("a"), holder)
    assert plan.actions == ()
    assert plan.waiting[A].code == "waiting_for_removal" and CARD in plan.waiting[A].message


def test_a_whole_gpu_waits_for_every_part_of_it() -> None:
    whole = with_cards(wanted("a"), CARD)
    for part in (
        container("c", gpu_uuids=(CARD,), share=HERE),
        container("c", gpu_uuids=(MIG_A,), parent_gpus=(CARD,)),
        exited("c", gpu_uuids=(CARD,), share=HERE),
    ):
        unreleased = {("c", 1): part} if part.status == "exited" else {}
        assert started(whole, part, unreleased=unreleased) == set()
    assert started(in_project("prj_2", shares("b")), shares("a")) == {"a"}


# --- when it is free

ENDED = exited("a", gpu_uuids=(CARD,), share=HERE)
NEIGHBOUR = container("b", gpu_uuids=(CARD,), share=HERE)


def releases(*things: Any, **more: Any) -> list[Release]:
    plan = decided(*things, unreleased={A: ENDED}, **more)
    return [action for action in plan.actions if isinstance(action, Release)]


def test_a_gpu_is_checked_as_a_whole_when_its_last_share_has_ended() -> None:
    assert releases(ENDED, NEIGHBOUR) == [Release(ENDED, (), (CARD,))]
    assert releases(ENDED) == [Release(ENDED, (CARD,), ())]
    starting = {("b", 1): Work(ActionKind.START, (CARD,), share=HERE)}
    assert releases(ENDED, work=starting) == [Release(ENDED, (), (CARD,))]
    beside = {("b", 1): Work(ActionKind.RELEASE)}  # of one that ended beside this one
    assert releases(ENDED, work=beside) == [Release(ENDED, (CARD,), ())]


def test_a_new_share_waits_while_the_gpu_is_checked_as_a_whole() -> None:
    """Its new processes would count as left behind by the other share."""
    assert started(shares("b"), ENDED, unreleased={A: ENDED}) == set()
    assert (
        started(shares("b"), ENDED, work={A: Work(ActionKind.RELEASE, (CARD,))}, unreleased={A: ENDED})
        == set()
    )
    assert started(shares("c"), ENDED, NEIGHBOUR, unreleased={A: ENDED}) == {"c"}


def on_the_card(reader: NvmlGpuReader) -> set[tuple[int, int | None]]:
    """Its processes, each of them once, and what each has there."""
    reading = reader.fresh(5)
    processes = (reading.samples[0]["processes"] if reading else None) or []
    assert len({one["pid"] for one in processes}) == len(processes)
    return {(one["pid"], one["memory_used_mib"]) for one in processes}


def test_neighbours_do_not_delay_the_release_of_a_share(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as own, process() as theirs:
        of = {own: ENDED.container_id, theirs: NEIGHBOUR.container_id}
        gate = ReleaseGate(reader, of.get, within_s=0.3)
        gate.learn(reader.latest(), in_use=())
        gate.note_start([CARD])
        busy = ["gpus 1", "set 0 used_mib 40000", f"process 0 compute {theirs} 30000"]
        nvml.write(*busy)
        assert gate.wait(ENDED, [], [CARD]) == {}
        nvml.write(*busy, f"process 0 compute {own} 100")
        wait_until(lambda: on_the_card(reader) == {(own, 100), (theirs, 30_000)})
        left = gate.wait(ENDED, [], [CARD])
        assert f"{own} (" in left[CARD] and f"{theirs} (" not in left[CARD]
        # The last one: nothing of anybody may be left.
        assert f"{theirs} (" in gate.wait(ENDED, [CARD])[CARD]


def test_the_memory_that_shares_left_shows_when_the_last_has_ended(
    nvml: NvmlStandin, reader: NvmlGpuReader
) -> None:
    gate = ReleaseGate(reader, lambda _: None, within_s=0.3)
    gate.learn(reader.latest(), in_use=())
    gate.note_start([CARD])
    nvml.write("gpus 1", "set 0 used_mib 40000")
    assert gate.wait(ENDED, [], [CARD]) == {}
    assert "40000 MiB of its memory are still in use" in gate.wait(ENDED, [CARD])[CARD]


def test_clients_of_mps_are_seen(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as client, process() as both:
        lines = [f"process 0 mps {client} 300", f"process 0 compute {both} 200", f"process 0 mps {both} 200"]
        nvml.write("gpus 1", *lines)
        wait_until(lambda: on_the_card(reader) == {(client, 300), (both, 200)})


def test_processes_of_the_first_share_do_not_count_as_earlier_ones(
    nvml: NvmlStandin, reader: NvmlGpuReader, tmp_path: Path
) -> None:
    """It was not on the GPU when the first share started."""
    first, second = with_share(simulated()), with_share(simulated())
    with (
        process() as left,
        agent_with(SimulatedRuntime(start_s=0), reader, lambda _: None, tmp_path) as server,
    ):
        server.wants(first)
        wait_until(lambda: server.phase(first) == "running")
        nvml.write("gpus 1", "set 0 used_mib 5", f"process 0 compute {left} 100")
        wait_until(lambda: on_the_card(reader) == {(left, 100)})
        server.wants(first, second)
        wait_until(lambda: server.phase(second) == "running")
        server.wants(stopped(first), second)
        wait_until(lambda: server.phase(first) == "exited")
        assert not any(report.incidents for _, report in server.reports)  # it may be the second one's
        server.wants(stopped(second))
        wait_until(lambda: server.phase(second) == "exited", timeout_s=10)
        [incident] = {one.id: one for _, report in server.reports for one in report.incidents}.values()
        assert incident.uuid == CARD and f"{left} (" in incident.message


def stopped(asked: Assignment) -> Assignment:
    return asked.model_copy(update={"want": "stopped", "may_start": False})
