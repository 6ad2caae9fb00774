"""Shares of cards: what a container is given and told, who may have a card together, and when it is free."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.devices import Devices, Share, claims, devices_of
from mooring.agent.docker import DockerRuntime
from mooring.agent.docker_create import Abilities, Image, Limits, container_config, environment, spec_hash
from mooring.agent.gpus import NvmlGpuReader, Pace
from mooring.agent.mps import Daemon, Mps, MpsUnavailableError
from mooring.agent.reconcile import Doing, Key, Release, Start, Work, decide
from mooring.agent.release import ReleaseGate
from mooring.agent.runtime import Container, StartDelayed
from mooring.agent.simulated import SimulatedRuntime
from mooring.core.instance import InstanceRequest
from mooring.schemas.agent import Assignment
from tests.agent.agents import agent_with
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    image_with,
    output_of,
    runtime_on,
    start,
    with_more,
)
from tests.agent.grants import CARD, MIG_A, with_cards, with_mig, with_share
from tests.agent.worlds import assignment as simulated
from tests.agent.worlds import container, exited, wanted, world
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

A: Key = ("a", 1)
IMAGE = Image(id="sha256:1", digest="sha256:2")
HERE = Share("shared", 250, 20_000, "prj_1")
ELSEWHERE = Share("shared", 250, 20_000, "prj_2")


# --- what an assignment says


def test_an_assignment_without_grants_is_of_whole_cards() -> None:
    assert devices_of(assignment(gpu_uuids=("GPU-a", "GPU-b"))) == Devices(("GPU-a", "GPU-b"))
    assert devices_of(assignment()) == Devices()


def test_whole_cards_are_the_same_with_grants_and_without() -> None:
    """A container that an agent of before has made is adopted by its hash."""
    old = assignment(gpu_uuids=(CARD, uuid_of(1)))
    new = with_cards(old, CARD, uuid_of(1))
    assert devices_of(old) == devices_of(new)
    assert spec_hash(old) == spec_hash(new)
    configs = [container_config(one, IMAGE, Abilities(), Limits(), CONTROL_PLANE) for one in (old, new)]
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


def test_a_share_that_makes_no_sense_is_whole_cards_to_itself() -> None:
    both = with_cards(assignment(), CARD, uuid_of(1)).model_copy(update={"isolation": "shared"})
    assert devices_of(both) == Devices((CARD, uuid_of(1)))
    assert set(claims(devices_of(both)).values()) == {None}


# --- what a container is told


def told(given: Assignment, image: Image = IMAGE, **abilities: Any) -> dict[str, str]:
    entries = environment(given, image, Abilities(mps=Mps(Path("/run/mps")), **abilities))
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_mps_is_told_the_limits_of_the_share() -> None:
    variables = told(with_share(assignment(), 20_389, milli=250, isolation="mps"))
    assert {name: value for name, value in variables.items() if name.startswith("CUDA_MPS_")} == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20389M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert variables["NVIDIA_VISIBLE_DEVICES"] == CARD


@pytest.mark.parametrize(("milli", "percent"), [(1, "1"), (125, "12"), (999, "99")])
def test_threads_are_rounded_down_and_never_none(milli: int, percent: str) -> None:
    variables = told(with_share(assignment(), milli=milli, isolation="mps"))
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent


@pytest.mark.parametrize(
    "given",
    [with_share(assignment()), with_cards(assignment(), CARD), with_mig(assignment(), MIG_A), assignment()],
)
def test_only_a_share_under_mps_has_to_do_with_mps(given: Assignment) -> None:
    assert not any(name.startswith("CUDA_MPS_") for name in told(given))
    host = container_config(given, IMAGE, Abilities(), Limits(), CONTROL_PLANE)["HostConfig"]
    assert "Mounts" not in host


def test_simulated_cards_have_no_mps() -> None:
    given = with_share(assignment(), isolation="mps")
    assert not any(name.startswith("CUDA_MPS_") for name in told(given, simulated_gpus=True))


def test_what_an_image_bakes_in_does_not_undo_the_limits() -> None:
    image = Image(
        id="1", digest=None, env=("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_CLIENT_PRIORITY=0")
    )
    given = with_share(assignment(), isolation="mps")
    entries = environment(given, image, Abilities())
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in entries
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in entries
    assert "CUDA_MPS_CLIENT_PRIORITY" in entries  # a name without = unsets it
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment(assignment(), image, Abilities())


@pytest.mark.parametrize("name", ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_PIPE_DIRECTORY"])
def test_users_do_not_set_limits(name: str) -> None:
    with pytest.raises(ValueError, match="is set by Mooring itself"):
        InstanceRequest.model_validate({"image": "a", "env": {name: "x"}})


def test_the_two_mounts_are_the_operators() -> None:
    given = with_share(assignment(), isolation="mps")
    config = container_config(given, IMAGE, Abilities(mps=Mps(Path("/run/mps"))), Limits(), CONTROL_PLANE)
    mounts = [(one["Type"], one["Source"], one["Target"]) for one in config["HostConfig"]["Mounts"]]
    assert mounts == [("bind", "/run/mps", "/run/mps"), ("bind", "/run/mps/shm", "/dev/shm")]
    assert config["HostConfig"]["IpcMode"] == "private"
    assert "Binds" not in config["HostConfig"]


# --- the daemon of MPS

# Listens as the real one does. NVIDIA's protocol is not spoken: nobody here asks it anything.
DAEMON = """
import os, socket, sys, time
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.bind(sys.argv[1] + "/control")
control.listen()
os.setuid(int(sys.argv[2]))
print("listening", flush=True)
time.sleep(1000)
"""


@contextmanager
def daemon(pipe: Path, *, own_shm: bool = True, uid: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    (pipe / "shm").mkdir(parents=True, exist_ok=True)
    script = 'if [ "$1" = own ]; then mount --bind "$2/shm" /dev/shm; fi; shift; exec "$0" -c "$3" "$1" "$2"'
    shm = "own" if own_shm else "the host's"
    argv = ["unshare", "--mount", "sh", "-c", script, sys.executable, shm, str(pipe), str(uid), DAEMON]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == b"listening\n"
        yield running
    finally:
        running.kill()
        running.communicate()
        (pipe / "control").unlink()


def why_not(pipe: Path) -> str:
    with pytest.raises(MpsUnavailableError) as caught:
        Daemon(pipe).check()
    assert not Mps(pipe).answers()
    return str(caught.value)


def test_a_daemon_that_is_at_work_is_used(tmp_path: Path) -> None:
    with daemon(tmp_path):
        Daemon(tmp_path).check()
        assert Mps(tmp_path).answers()


def test_each_card_may_have_a_daemon_of_its_own(tmp_path: Path) -> None:
    cards: list[str] = []
    mps = Mps(tmp_path / "{gpu}", lambda: cards)
    assert not mps.answers()  # no card is known yet
    with daemon(tmp_path / CARD):
        cards.append(CARD)
        assert mps.answers()
        cards.append(uuid_of(1))
        assert not mps.answers()
        mps.require([CARD], Share("mps", 250, 20_000, "prj_1"))
        with pytest.raises(StartDelayed):
            mps.require([uuid_of(1)], Share("mps", 250, 20_000, "prj_1"))
    variables = dict(
        entry.split("=", 1)
        for entry in environment(with_share(assignment(), isolation="mps"), IMAGE, Abilities(mps=mps))
    )
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / CARD)


@pytest.mark.parametrize("card", ["../etc", "GPU-a/../../etc", ".", ""])
def test_the_name_of_a_card_leads_nowhere_else(tmp_path: Path, card: str) -> None:
    with pytest.raises(MpsUnavailableError):
        Mps(tmp_path / "{gpu}").of(card)


def test_none_was_ever_started(tmp_path: Path) -> None:
    assert "there is no" in why_not(tmp_path / "nowhere")
    (tmp_path / "shm").mkdir()
    assert "no MPS daemon answers" in why_not(tmp_path)


def test_one_that_was_killed_leaves_its_socket(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        running.kill()
        running.wait()
        assert (tmp_path / "control").is_socket()
        assert "no MPS daemon answers" in why_not(tmp_path)


def test_one_that_is_stopped_does_not_count(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        os.kill(running.pid, 19)
        wait_until(lambda: not Mps(tmp_path).answers())
        assert "is stopped or dead" in why_not(tmp_path)


def test_one_with_the_hosts_shared_memory_is_not_used(tmp_path: Path) -> None:
    with daemon(tmp_path, own_shm=False):
        assert "/dev/shm is not" in why_not(tmp_path)


def test_anybody_may_listen_in_tmp(tmp_path: Path) -> None:
    # The socket's credentials are those of who called listen(); the directory's owner is what gives it away.
    with daemon(tmp_path):
        os.chown(tmp_path, 1000, 1000)
        assert "is of user 1000" in why_not(tmp_path)
        os.chown(tmp_path, 0, 0)
        os.chown(tmp_path / "shm", 1000, 1000)
        assert "is of user 1000" in why_not(tmp_path)


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    with daemon(pipe):
        (tmp_path / "link").symlink_to(pipe)
        assert "is not a directory" in why_not(tmp_path / "link")


# --- with a real engine


@pytest.fixture
def node(docker_node: DockerNode) -> Iterator[DockerNode]:
    yield docker_node
    docker_node.remove_containers()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    return tmp_path / "mps"


@pytest.fixture
def runtime(node: DockerNode, pipe: Path) -> Iterator[DockerRuntime]:
    with closing(runtime_on(node, mps=Mps(pipe))) as made:
        yield made


def test_two_share_a_card_under_mps(node: DockerNode, runtime: DockerRuntime, pipe: Path) -> None:
    image = image_with(node, "mps", ["ENV CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 KEPT=1"])
    shares = [
        with_share(assignment(image=image), 20_000, milli=250, isolation="mps"),
        with_share(assignment(image=image), 40_000, milli=500, isolation="mps"),
    ]
    with daemon(pipe):
        assert runtime.facts().mps
        first, second = (start(runtime, each) for each in shares)
        for one, memory, threads in ((first, "20000", "25"), (second, "40000", "50")):
            inside = output_of(runtime, one, ["env"]).splitlines()
            assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}M" in inside
            assert f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={threads}" in inside
            assert f"CUDA_MPS_PIPE_DIRECTORY={pipe}" in inside
            assert "KEPT=1" in inside
            assert f"NVIDIA_VISIBLE_DEVICES={CARD}" in inside
        # /dev/shm is the same folder for the daemon and all its clients, and for nobody else.
        output_of(runtime, first, ["sh", "-c", "echo hello > /dev/shm/cuda.shm"])
        assert output_of(runtime, second, ["cat", "/dev/shm/cuda.shm"]) == "hello\n"
        assert (pipe / "shm" / "cuda.shm").read_text() == "hello\n"
        assert "control" in output_of(runtime, second, ["ls", str(pipe)])


def test_without_the_daemon_a_share_under_mps_waits(
    node: DockerNode, runtime: DockerRuntime, pipe: Path
) -> None:
    """Its programs would run, and without any limit."""
    asked = with_share(assignment(), isolation="mps")
    assert not runtime.facts().mps
    with pytest.raises(StartDelayed) as caught:
        start(runtime, asked)
    assert caught.value.reason.code == "mps_unavailable"
    assert runtime.containers() == ([], [])
    with daemon(pipe):
        running = start(runtime, asked)
    runtime.kill(running)
    runtime.kill(running)
    [ended], _ = runtime.containers()
    assert (ended.status, ended.exit_code) == ("exited", 137)
    with pytest.raises(StartDelayed):
        runtime.restart(ended)


def test_a_share_is_known_again_by_its_labels(node: DockerNode, runtime: DockerRuntime) -> None:
    asked = with_share(assignment(), 20_000)
    made = start(runtime, asked)
    assert made.share == Share("shared", 250, 20_000, "proj-1")
    assert (made.gpu_uuids, made.cards) == ((CARD,), ())
    with closing(runtime_on(node)) as another:
        assert another.containers() == ([made], [])
        assert start(another, asked).container_id == made.container_id
        inside = output_of(another, made, ["cat", "/proc/mounts"])
    assert "/dev/shm" in inside and str(CARD) not in inside


# --- who may have a card together


def started(*things: Any, **more: Any) -> set[str]:
    plan = decide(world(*things, **more))
    return {action.assignment.instance_id for action in plan.actions if isinstance(action, Start)}


def in_project(project_id: str, given: Assignment) -> Assignment:
    return with_more(given, project_id=project_id)


def shares(instance_id: str) -> Assignment:
    return with_share(wanted(instance_id))


def test_instances_of_one_project_share_a_card() -> None:
    assert started(shares("a"), shares("b")) == {"a", "b"}
    assert started(shares("b"), container("c", gpu_uuids=(CARD,), share=HERE)) == {"b"}


@pytest.mark.parametrize(
    "holder",
    [
        container("c", gpu_uuids=(CARD,)),  # the whole of it
        container("c", gpu_uuids=(CARD,), share=ELSEWHERE),  # R12
        container("c", gpu_uuids=(MIG_A,), cards=(CARD,)),  # a part of it
    ],
)
def test_whoever_else_has_it_is_waited_for(holder: Container) -> None:
    plan = decide(world(shares("a"), holder))
    assert plan.actions == ()
    assert plan.waiting[A].code == "waiting_for_removal" and CARD in plan.waiting[A].message


def test_the_whole_card_waits_for_every_part_of_it() -> None:
    whole = with_cards(wanted("a"), CARD)
    for part in (
        container("c", gpu_uuids=(CARD,), share=HERE),
        container("c", gpu_uuids=(MIG_A,), cards=(CARD,)),
        exited("c", gpu_uuids=(CARD,), share=HERE),
    ):
        unreleased = {("c", 1): part} if part.status == "exited" else {}
        assert started(whole, part, unreleased=unreleased) == set()
    assert started(in_project("prj_2", shares("b")), shares("a")) == {"a"}


# --- when it is free

ENDED = exited("a", gpu_uuids=(CARD,), share=HERE)
NEIGHBOUR = container("b", gpu_uuids=(CARD,), share=HERE)


def releases(*things: Any, **more: Any) -> list[Release]:
    plan = decide(world(*things, unreleased={A: ENDED}, **more))
    return [action for action in plan.actions if isinstance(action, Release)]


def test_a_card_is_looked_at_as_a_whole_when_the_last_share_of_it_has_ended() -> None:
    assert releases(ENDED, NEIGHBOUR) == [Release(ENDED, (), (CARD,))]
    assert releases(ENDED) == [Release(ENDED, (CARD,), ())]
    starting = {("b", 1): Work(Doing.START, (CARD,), share=HERE)}
    assert releases(ENDED, work=starting) == [Release(ENDED, (), (CARD,))]
    beside = {("b", 1): Work(Doing.RELEASE)}  # of one that ended beside this one
    assert releases(ENDED, work=beside) == [Release(ENDED, (CARD,), ())]


def test_a_newcomer_waits_while_the_card_is_looked_at_as_a_whole() -> None:
    """What it began on the card would pass for what the other left behind."""
    assert started(shares("b"), ENDED, unreleased={A: ENDED}) == set()
    assert started(shares("b"), ENDED, work={A: Work(Doing.RELEASE, (CARD,))}, unreleased={A: ENDED}) == set()
    assert started(shares("c"), ENDED, NEIGHBOUR, unreleased={A: ENDED}) == {"c"}


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    return NvmlStandin(tmp_path, "gpus 1", "set 0 used_mib 5")


@pytest.fixture
def reader(nvml: NvmlStandin) -> Iterator[NvmlGpuReader]:
    with closing(NvmlGpuReader(Pace(sample_interval_s=60), nvml.environment)) as made:
        assert wait_until(lambda: made.latest().samples)
        yield made


@contextmanager
def process() -> Iterator[int]:
    running = subprocess.Popen(["sleep", "1000"])
    try:
        yield running.pid
    finally:
        running.kill()
        running.wait()


def on_the_card(reader: NvmlGpuReader) -> set[tuple[int, int | None]]:
    """Its processes, each of them once, and what each has there."""
    reading = reader.fresh(5)
    processes = (reading.samples[0]["processes"] if reading else None) or []
    assert len({one["pid"] for one in processes}) == len(processes)
    return {(one["pid"], one["memory_used_mib"]) for one in processes}


def test_neighbours_are_not_held_against_a_share(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as own, process() as theirs:
        of = {own: ENDED.container_id, theirs: NEIGHBOUR.container_id}
        gate = ReleaseGate(reader, of.get, within_s=0.3)
        gate.learn(reader.latest(), in_use=())
        gate.begins([CARD])
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
    gate.begins([CARD])
    nvml.write("gpus 1", "set 0 used_mib 40000")
    assert gate.wait(ENDED, [], [CARD]) == {}
    assert "40000 MiB of its memory are still in use" in gate.wait(ENDED, [CARD])[CARD]


def test_clients_of_mps_are_seen(nvml: NvmlStandin, reader: NvmlGpuReader) -> None:
    with process() as client, process() as both:
        lines = [f"process 0 mps {client} 300", f"process 0 compute {both} 200", f"process 0 mps {both} 200"]
        nvml.write("gpus 1", *lines)
        wait_until(lambda: on_the_card(reader) == {(client, 300), (both, 200)})


def test_what_the_first_share_left_is_no_bystander_of_the_second(
    nvml: NvmlStandin, reader: NvmlGpuReader, tmp_path: Path
) -> None:
    """It was not on the card when the first of them began."""
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
