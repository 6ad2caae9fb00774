"""R7 and R14 with a real dockerd: the limits of hostile programs, and the runtime of containers."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooring.agent.docker.container_settings import limits_here
from mooring.agent.runtime import StartRefused
from tests.agent.docker_assignments import (
    assignment,
    output_of,
    runtime_on,
    start,
    stop,
    the_ended,
    with_more,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

PIDS = 40
FORK_BOMB = ["sh", "-c", "(while :; do sleep 1000 & done) 2>/dev/null; exec sleep 1000"]
LONG_SYSTEM_CALL = ["dd", "if=/dev/urandom", "of=/dev/null", "bs=256M"]  # a read takes 0.7 s of CPU time
PAUSED_AFTER_NS = 200_000_000  # with 0.01 CPUs a pause of 20 s, twice the engine client's timeout
FLOOD_KIB = 4096
LOG_KIB = 64


def test_a_fork_bomb_is_limited_to_its_own_pids(node: DockerNode) -> None:
    runtime = runtime_on(node, limits=replace(limits_here(), pids=PIDS))
    bomb = start(runtime, assignment(command=FORK_BOMB))

    def processes() -> int:
        return len(node.client.api.top(bomb.container_id)["Processes"])

    wait_until(lambda: processes() >= PIDS - 5)
    assert processes() <= PIDS
    neighbour = start(runtime, assignment())
    assert output_of(runtime, neighbour, ["echo", "alive"]) == "alive\n"
    stop(runtime, bomb, 1)
    assert the_ended(runtime).instance_id == bomb.instance_id
    runtime.close()


def test_a_container_paused_by_its_cpu_limit_ends_when_killed(node: DockerNode) -> None:
    """A system call runs to its end, far beyond the CPU limit; then the kernel pauses the process for long.

    Older kernels pause processes within system calls. There, the kill ends the container at once.
    """
    runtime = runtime_on(node)
    paused = start(runtime, with_more(assignment(command=LONG_SYSTEM_CALL, cpus=0.01), memory_mib=600))

    def cpu_ns() -> int:
        stats = node.client.api.stats(paused.container_id, stream=False, one_shot=True)
        return int(stats["cpu_stats"]["cpu_usage"]["total_usage"])

    wait_until(lambda: cpu_ns() >= PAUSED_AFTER_NS, 60)
    runtime.kill(paused)
    assert the_ended(runtime).instance_id == paused.instance_id
    runtime.close()


def test_only_the_configured_runtime_runs_containers(node: DockerNode) -> None:
    other_name = "io.containerd.runc.v2"  # Docker has it without being configured
    runtime = runtime_on(node, container_runtime=other_name)
    container = start(runtime, assignment())
    host = node.client.api.inspect_container(container.container_id)["HostConfig"]
    assert (host["Runtime"], runtime.facts().problem) == (other_name, None)
    stop(runtime, container, 1)
    runtime.close()
    changed = runtime_on(node)
    with pytest.raises(StartRefused) as caught:
        changed.restart(container)
    assert (caught.value.reason.code, caught.value.wrong_gpus) == ("runtime_changed", False)
    assert changed.containers() == ([], [])
    changed.close()
    absent = runtime_on(node, container_runtime="runsc")
    problem = absent.facts().problem
    assert problem is not None
    assert (problem.code, "runsc" in problem.message) == ("runtime_missing", True)
    absent.close()


def test_a_flood_of_output_does_not_fill_the_nodes_disk(node: DockerNode) -> None:
    limits = replace(limits_here(), log_max_size=f"{LOG_KIB}k", log_max_files=2)
    runtime = runtime_on(node, limits=limits)
    flood = ["sh", "-c", f"yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | head -c {FLOOD_KIB}k"]
    start(runtime, assignment(command=flood))
    container_id = the_ended(runtime).container_id
    log = Path(node.client.api.inspect_container(container_id)["LogPath"])
    kept = sum(path.stat().st_size for path in log.parent.glob(f"{log.name}*"))
    assert 0 < kept < 3 * LOG_KIB * 1024
    runtime.close()
