"""`DockerRuntime` with a real dockerd: stops, restarts and lists of containers, and an engine that stops."""

import os
import threading
from contextlib import suppress

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import RuntimeUnavailable, StartRefused
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    create_by_hand,
    runtime_on,
    start,
    stop,
    the_ended,
)
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.waiting import wait_until


def test_stop_sends_sigterm_and_stop_and_remove_are_repeatable(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    container = start(
        runtime, assignment(command=["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"])
    )
    stop(runtime, container, 10)
    assert runtime.containers()[0][0].exit_code == 7
    stop(runtime, container, 10)
    runtime.remove(container)
    runtime.remove(container)
    stop(runtime, container, 10)
    assert all_containers(node) == []


def test_a_program_that_ignores_sigterm_can_be_killed(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(command=["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]))
    stop(runtime, container, 1)
    ended = runtime.containers()[0][0]
    assert (ended.status, ended.exit_code, ended.oom_killed) == ("exited", 137, False)
    assert str(ended.finished_at) > str(ended.started_at)
    runtime.kill(container)  # it has ended, which is no error


def test_a_running_container_is_not_removed(node: DockerNode, runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    with pytest.raises(RuntimeUnavailable, match="running"):
        runtime.remove(container)
    assert all_containers(node) == [container.container_id]


def test_a_program_over_its_memory_limit_is_reported_as_oom_killed(runtime: DockerRuntime) -> None:
    start(runtime, assignment(command=["tail", "/dev/zero"]))
    ended = the_ended(runtime)
    assert (ended.exit_code, ended.oom_killed) == (137, True)


def test_an_exited_container_can_be_restarted_until_it_is_removed(runtime: DockerRuntime) -> None:
    container = start(
        runtime, assignment(command=["sh", "-c", "sleep 0.1; exit 3"], ports=[{"container": 80}])
    )
    ended = the_ended(runtime)
    runtime.restart(ended)
    again = runtime.containers()[0][0]
    assert again.container_id == container.container_id
    assert str(again.started_at) > str(ended.started_at)
    stop(runtime, again, 1)
    runtime.remove(again)
    with pytest.raises(StartRefused) as caught:
        runtime.restart(again)
    assert caught.value.reason.code == "container_gone"


def test_containers_with_foreign_or_invalid_labels_are_orphans(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    own = start(runtime, assignment())
    foreign = create_by_hand(
        node, assignment(instance_id="foreign"), labels={"mooring.control_plane": "another"}
    )
    invalid = create_by_hand(node, assignment(instance_id="invalid"), labels={"mooring.attempt": "first"})
    node.client.api.create_container(images.BUSYBOX, ["true"], name="unlabelled")
    containers, orphans = runtime.containers()
    assert [container.container_id for container in containers] == [own.container_id]
    assert {(orphan.container_id, orphan.instance_id, orphan.control_plane_id) for orphan in orphans} == {
        (foreign, "foreign", "another"),
        (invalid, "invalid", CONTROL_PLANE),
    }


def test_a_node_that_has_not_joined_has_no_containers(node: DockerNode, runtime: DockerRuntime) -> None:
    start(runtime, assignment())
    not_joined = runtime_on(node, control_plane_id=None)
    containers, orphans = not_joined.containers()
    assert (containers, len(orphans)) == ([], 1)
    with pytest.raises(RuntimeUnavailable, match="joined"):
        start(not_joined, assignment())
    not_joined.close()


def test_a_list_tolerates_containers_that_appear_and_disappear(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            created = create_by_hand(node, assignment())
            node.client.api.remove_container(created, force=True)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        runtime.containers()
    done.set()
    for thread in threads:
        thread.join()


def test_facts(node: DockerNode, runtime: DockerRuntime) -> None:
    facts = runtime.facts()
    assert facts.version == node.client.version()["Version"]
    assert (facts.cpus, facts.problem, facts.simulated) == (os.cpu_count(), None, False)
    assert facts.memory_mib > 1000


def test_an_unreachable_engine_makes_everything_unknown(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    runtime = runtime_on(node, timeout_s=2)
    container = start(runtime, assignment())
    node.kill()
    with pytest.raises(RuntimeUnavailable):
        runtime.containers()
    with pytest.raises(RuntimeUnavailable):
        stop(runtime, container, 1)
    with pytest.raises(RuntimeUnavailable):
        runtime.remove(container)
    with pytest.raises(RuntimeUnavailable):
        start(runtime, assignment())
    assert problem_of(runtime) == "docker_unavailable"
    node.start()
    assert problem_of(runtime) is None
    assert [found.container_id for found in runtime.containers()[0]] == [container.container_id]
    node.freeze()
    with pytest.raises(RuntimeUnavailable):
        runtime.containers()
    assert problem_of(runtime) == "docker_unavailable"
    node.thaw()
    assert wait_until(lambda: problem_of(runtime) is None)
    runtime.close()


def test_changes_are_yielded_until_the_engine_stops(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    changes: list[None] = []
    ended = threading.Event()

    def listen() -> None:
        with suppress(RuntimeUnavailable):
            for change in runtime.changes():
                changes.append(change)
        ended.set()

    listener = threading.Thread(target=listen)
    listener.start()
    # Start containers until one ends after the listener has connected.
    wait_until(lambda: start(runtime, assignment(command=["true"])) and changes)
    node.kill()
    assert ended.wait(10)
    listener.join()
    runtime.close()


def test_close_ends_a_listener(node: DockerNode) -> None:
    runtime = runtime_on(node)
    listener = threading.Thread(target=lambda: list(runtime.changes()))
    listener.start()
    wait_until(lambda: any(thread.name == "docker-stream" for thread in threading.enumerate()))
    runtime.close()
    listener.join(10)
    assert not listener.is_alive()


def problem_of(runtime: DockerRuntime) -> str | None:
    problem = runtime.facts().problem
    return problem.code if problem else None
