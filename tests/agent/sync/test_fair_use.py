"""The load that one project puts on a node does not delay another project (real dockerd, whole agent)."""

import re
import threading
import time
from contextlib import closing
from typing import Any, Literal

import pytest

from mooring.agent.images.pull_pace import PullTimeouts
from mooring.agent.runtime import StartRefused
from mooring.agent.sync.worker_pools import PULLS_OF_PROJECT
from mooring.schemas.agent import Assignment, Removal
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamRequest, StreamStatus
from tests.agent import builders, docker_assignments
from tests.agent.control_planes import TinyControlPlane
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import Registry
from tests.testbed.slow_registry import slow_registry
from tests.testbed.waiting import wait_until

ATTACKER, VICTIM = "prj_attacker", "prj_victim"
IGNORES_SIGTERM = ["sh", "-c", "trap '' TERM; while :; do sleep 3600 & wait $!; done"]
AN_HOUR_S = 3600
# The attack lasts for as long as the attacker likes, but pulls of MIN_RUN_S (15 s) yield to other projects.
SOON_S = 14.0


@pytest.fixture
def server(docker_server: TinyControlPlane) -> TinyControlPlane:
    return docker_server


def assignment_of(project_id: str, **more: Any) -> Assignment:
    made = builders.assignment(project_id=project_id, cpus=0.01, **{"image": images.BUSYBOX, **more})
    # The images exist only on the node, and the registries have addresses that an admin must allow.
    return made.model_copy(update={"local_images": True, "registry_listed": True})


def removal_of(given: Assignment, timeout_s: int = AN_HOUR_S) -> Removal:
    return Removal(instance_id=given.instance_id, attempt=1, stop_timeout_s=timeout_s)


def await_phase(server: TinyControlPlane, given: Assignment, phase: str, within_s: float = SOON_S) -> None:
    wait_until(lambda: server.phase(given) == phase, within_s)


@pytest.mark.parametrize("silent_at", ["manifests", "layers"])
def test_hung_pulls_of_one_project_do_not_delay_anothers_start(
    server: TinyControlPlane, root_address: str, silent_at: Literal["manifests", "layers"]
) -> None:
    with slow_registry(root_address, silent_at) as slow:
        hung = [assignment_of(ATTACKER, image=slow.image(f"hung-{number}")) for number in range(16)]
        server.wants(*hung)
        # The layers of one image take all downloads of dockerd, so no other pull gets to its layers.
        pulls = 1 if silent_at == "layers" else PULLS_OF_PROJECT
        wait_until(lambda: slow.pulls() >= pulls, timeout_s=60)
        victim = assignment_of(VICTIM)
        server.wants(*hung, victim)
        await_phase(server, victim, "running")
        assert slow.begun() <= PULLS_OF_PROJECT
        # A deletion ends the pulls that wait for their turn, and those that hang.
        server.wants(victim)
        wait_until(lambda: len(server.instances()) == 1)
        wait_until(lambda: not _open_requests())


def _open_requests() -> list[str]:
    """The threads that read an answer of the engine, without the thread that reads its events."""
    names = [thread.name for thread in threading.enumerate() if thread.name == "docker-stream"]
    return names[1:]


def test_a_trickling_pull_is_aborted_when_another_project_waits(
    server: TinyControlPlane, root_address: str, registry: Registry
) -> None:
    with slow_registry(root_address, "layers", bytes_per_s=2000) as slow:
        trickles = [assignment_of(ATTACKER, image=slow.image(f"trickle-{number}")) for number in range(8)]
        server.wants(*trickles)
        # As many layers as dockerd downloads at a time, for all projects together.
        wait_until(lambda: len(slow.waiting) == 3)
        victim = assignment_of(VICTIM, image=registry.add_image("fair/victim", extra_layers=2))
        server.wants(*trickles, victim)
        await_phase(server, victim, "running", 60)
        assert {server.phase(one) for one in trickles} == {"starting"}
        server.wants(victim)
        wait_until(lambda: slow.pulls() == 0)


def test_a_pull_without_progress_fails_and_its_requests_end(node: DockerNode, root_address: str) -> None:
    runtime = docker_assignments.runtime_on(node, pull_timeouts=PullTimeouts(stall_s=2))
    with slow_registry(root_address, "layers", bytes_per_s=2000) as slow, closing(runtime):
        with pytest.raises(StartRefused) as caught:
            builders.pull_and_start(runtime, assignment_of(ATTACKER, image=slow.image("stalled")))
        assert caught.value.reason.code == "image_pull_timeout"
        wait_until(lambda: slow.pulls() == 0)


def test_instances_with_the_same_image_pull_it_once(server: TinyControlPlane, registry: Registry) -> None:
    image = registry.add_image("fair/once", extra_layers=1)
    log_before = registry.daemon.log.stat().st_size
    sharing = [assignment_of(project, image=image) for project in (ATTACKER, VICTIM) for _ in range(6)]
    server.wants(*sharing)
    for one in sharing:
        await_phase(server, one, "running", 60)
    logged = registry.daemon.log.read_bytes()[log_before:].decode()
    blobs = re.findall(r"GET /v2/fair/once/blobs/\S+", logged)
    assert blobs
    assert len(blobs) == len(set(blobs))


@pytest.mark.timeout(500)  # Docker starts and removes 64 containers, beside the containers of other tests
def test_stubborn_programs_of_one_project_do_not_delay_anothers_delete(server: TinyControlPlane) -> None:
    stubborn = [assignment_of(ATTACKER, command=IGNORES_SIGTERM) for _ in range(64)]
    victim = assignment_of(VICTIM)
    server.wants(victim, *stubborn)
    for one in (victim, *stubborn):
        await_phase(server, one, "running", 120)
    try:
        server.wants(victim, removals=tuple(map(removal_of, stubborn)))
        generation = server.generation
        wait_until(lambda: (report := server.last()) and report.generation == generation)
        began = time.monotonic()
        server.wants(removals=(*map(removal_of, stubborn), removal_of(victim, 10)))
        wait_until(lambda: server.phase(victim) is None, SOON_S)
        assert time.monotonic() - began < SOON_S
        assert {server.phase(one) for one in stubborn} == {"running"}
    finally:
        server.wants(removals=tuple(removal_of(one, 0) for one in stubborn))
        # A shorter timeout also holds for a stop in progress.
        wait_until(lambda: not server.instances(), 180)


def test_followed_logs_of_one_project_do_not_delay_anothers_logs_and_exec(server: TinyControlPlane) -> None:
    attacker = assignment_of(ATTACKER)
    victim = assignment_of(VICTIM, command=["sh", "-c", "echo here; sleep 1000"])
    server.wants(attacker, victim)
    await_phase(server, attacker, "running")
    await_phase(server, victim, "running")
    follow = LogsRequest(tail=None, since=None, follow=True)
    server.request_streams(*[_stream(f"str_a{number}", attacker, logs=follow) for number in range(64)])
    wait_until(lambda: len(server.receiver.received) == 64, 30)
    logs = LogsRequest(tail=None, since=None, follow=False)
    command = ExecRequest(command=["echo", "hi"], timeout_s=10, max_output_bytes=1000)
    server.request_streams(_stream("str_logs", victim, logs=logs), _stream("str_exec", victim, exec=command))
    assert server.receiver.stream("str_logs").ended(SOON_S) == StreamStatus()
    assert server.receiver.stream("str_exec").ended(SOON_S).exit_code == 0


def _stream(stream_id: str, given: Assignment, **request: LogsRequest | ExecRequest) -> StreamRequest:
    return StreamRequest.model_validate(
        {"id": stream_id, "instance_id": given.instance_id, "attempt": 1, "url": None, **request}
    )
