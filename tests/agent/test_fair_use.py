"""What one project does to a node's pools does not delay another project (real dockerd, whole agent)."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker import DockerRuntime
from mooring.agent.simulated_gpus import SimulatedGpuReader
from mooring.schemas.agent import Assignment, ExecRequest, LogsRequest, Removal, StreamFrame, StreamRequest
from tests.agent import worlds
from tests.agent.agents import agent_with
from tests.agent.control_planes import TinyControlPlane
from tests.testbed import images
from tests.testbed.slow_registry import slow_registry
from tests.testbed.waiting import wait_until

ATTACKER, VICTIM = "prj_attacker", "prj_victim"
IGNORES_SIGTERM = ["sh", "-c", "trap '' TERM; while :; do sleep 3600 & wait $!; done"]
AN_HOUR_S = 3600
SOON_S = 8.0  # on a busy machine; the attack lasts for as long as the attacker likes


@pytest.fixture
def server(runtime: DockerRuntime, tmp_path: Path) -> Iterator[TinyControlPlane]:
    """The control plane of an agent on the session's node."""
    with (
        closing(SimulatedGpuReader("gpu-1", 0, tenants=runtime.tenants)) as gpus,
        agent_with(runtime, gpus, gpus.container_of, tmp_path) as made,
    ):
        yield made


def of(project_id: str, **more: Any) -> Assignment:
    return worlds.assignment(project_id=project_id, cpus=0.01, **{"image": images.BUSYBOX, **more})


def gone(asked: Assignment, timeout_s: int = AN_HOUR_S) -> Removal:
    return Removal(instance_id=asked.instance_id, attempt=1, stop_timeout_s=timeout_s)


def await_phase(server: TinyControlPlane, asked: Assignment, phase: str, within_s: float = SOON_S) -> None:
    wait_until(lambda: server.phase(asked) == phase, within_s)


def test_hung_pulls_of_one_project_do_not_delay_anothers_start(
    server: TinyControlPlane, root_address: str
) -> None:
    with slow_registry(root_address, "manifests") as slow:
        hung = [of(ATTACKER, image=slow.image(f"hung-{number}")) for number in range(16)]
        server.wants(*hung)
        wait_until(lambda: slow.pulls() >= 2)
        victim = of(VICTIM)
        server.wants(*hung, victim)
        await_phase(server, victim, "running")
        # A hung pull that is deleted ends, and so does the request to its registry.
        server.wants(victim)
        wait_until(lambda: slow.pulls() == 0)
        wait_until(lambda: all(server.phase(one) is None for one in hung))


def test_stubborn_programs_of_one_project_do_not_delay_anothers_delete(server: TinyControlPlane) -> None:
    stubborn = [of(ATTACKER, command=IGNORES_SIGTERM) for _ in range(64)]
    victim = of(VICTIM)
    server.wants(victim, *stubborn)
    for one in (victim, *stubborn):
        await_phase(server, one, "running", 120)
    try:
        server.wants(victim, removals=tuple(map(gone, stubborn)))
        generation = server.generation
        wait_until(lambda: (report := server.last()) and report.generation == generation)
        began = time.monotonic()
        server.wants(removals=(*map(gone, stubborn), gone(victim, 10)))
        wait_until(lambda: server.phase(victim) is None, SOON_S)
        assert time.monotonic() - began < SOON_S
        assert {server.phase(one) for one in stubborn} == {"running"}
    finally:
        server.wants(removals=tuple(gone(one, 0) for one in stubborn))
        # A shorter timeout holds for a stop that is under way.
        wait_until(lambda: not server.instances(), 60)


def test_followed_logs_of_one_project_do_not_delay_anothers_logs_and_exec(server: TinyControlPlane) -> None:
    attacker, victim = of(ATTACKER), of(VICTIM, command=["sh", "-c", "echo here; sleep 1000"])
    server.wants(attacker, victim)
    await_phase(server, attacker, "running")
    await_phase(server, victim, "running")
    follow = LogsRequest(tail=None, since=None, follow=True)
    server.ask(*[_stream(f"str_a{number}", attacker, logs=follow) for number in range(64)])
    wait_until(lambda: len(server.uploads) >= 16, 30)
    logs = LogsRequest(tail=None, since=None, follow=False)
    command = ExecRequest(command=["echo", "hi"], timeout_s=10, max_output_bytes=1000)
    server.ask(_stream("str_logs", victim, logs=logs), _stream("str_exec", victim, exec=command))
    assert wait_until(lambda: _last(server, "str_logs"), SOON_S).end
    assert wait_until(lambda: _last(server, "str_exec"), SOON_S).exit_code == 0


def _stream(stream_id: str, asked: Assignment, **request: LogsRequest | ExecRequest) -> StreamRequest:
    return StreamRequest.model_validate(
        {"id": stream_id, "instance_id": asked.instance_id, "attempt": 1, "url": None, **request}
    )


def _last(server: TinyControlPlane, stream_id: str) -> StreamFrame | None:
    frames = server.uploads.get(stream_id, [])
    return frames[-1] if frames and frames[-1].is_last else None
