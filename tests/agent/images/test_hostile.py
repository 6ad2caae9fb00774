"""Hostile images, and containers created outside of Mooring, on a real dockerd (R4, R6, R11).

They must not change what the agent records about any container, nor how it treats other containers.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.reconcile import Release, Start
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config, container_name
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, StartRefused
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.sync.agent_state import AgentState
from mooring.schemas.agent import Assignment, SyncAnswer
from mooring_client.schemas.states import Reason
from tests.agent.agents import agent_with
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    create_by_hand,
    image_of_config,
    image_with,
    output_of,
    start,
    stop,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

VICTIM_GPU = "GPU-victim-0"
# All labels that any release has read from containers.
LABELS = {
    "mooring.host_ports": "boom",
    "mooring.share": f"shared/{'9' * 5000}/1",
    "mooring.cards": VICTIM_GPU,
    "mooring.secret_env": "PATH,HOME",
    "mooring.group": "grp_x",
    "mooring.gpus": VICTIM_GPU,
    "mooring.image": "sha256:0",
    "mooring.attempt": "7",
    "mooring.instance": "inst-victim",
    "mooring.project": "proj-victim",
    "mooring.control_plane": CONTROL_PLANE,
}
# Earlier releases set these only if they had a value.
CONDITIONAL = ("mooring.cards", "mooring.share", "mooring.secret_env", "mooring.group", "mooring.host_ports")


def refusal_of(runtime: DockerRuntime, given: Assignment) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value.reason


def labelled(node: DockerNode, name: str, **labels: str) -> str:
    return image_of_config(node, f"labelled-{name}", Labels=labels)


def create_as_an_earlier_release(node: DockerNode, runtime: DockerRuntime, given: Assignment) -> str:
    """Start a container without the conditional labels, as earlier releases did."""
    create_project_network(runtime)
    api: Any = node.client.api
    image = Image(id=api.inspect_image(given.spec.image)["Id"], digest=None)
    config = container_config(given, image, Abilities(), ContainerLimits(open_files=1024), CONTROL_PLANE)
    config["Labels"] = {name: value for name, value in config["Labels"].items() if name not in CONDITIONAL}
    for later in ("Healthcheck", "StopSignal"):
        config.pop(later, None)
    name = container_name(given.instance_id, given.attempt)
    made = str(api.create_container_from_config(config, name)["Id"])
    api.start(made)
    return made


def create_project_network(runtime: DockerRuntime) -> None:
    end(runtime, start(runtime, assignment()))


def end(runtime: DockerRuntime, container: Container) -> None:
    runtime.kill(container)
    wait_until(lambda: status_of(runtime, container) == "exited")
    runtime.remove(container)


@contextmanager
def run_with_docker(node: DockerNode, image: str, name: str | None = None) -> Iterator[str]:
    """A container that the operator runs with plain Docker."""
    made = node.client.containers.run(image, detach=True, name=name)
    yield str(made.id)


def plan_of(containers: list[Container], *assignments: Assignment) -> tuple[Any, ...]:
    """The agent's actions, given these containers and assignments."""
    known = AgentState(CONTROL_PLANE, 0)
    known.apply_listing(known.begin_listing(), containers, [])
    answer = {
        "control_plane_id": CONTROL_PLANE,
        "node_id": "nod_1",
        "generation": 1,
        "report_interval_s": 5,
        "assignments": assignments,
        "removals": [],
    }
    known.apply_answer(SyncAnswer.model_validate(answer), 0)
    plan = known.plan(0)
    assert plan is not None
    return plan.actions


# --- labels in an image


@pytest.mark.parametrize("label", LABELS)
def test_an_image_with_reserved_labels_is_rejected_without_effect_on_others(
    node: DockerNode, runtime: DockerRuntime, label: str
) -> None:
    neighbour = start(runtime, assignment())
    image = labelled(node, label.partition(".")[2], **{label: LABELS[label]})
    reason = refusal_of(runtime, assignment(image=image))
    assert reason.code == "image_config_refused"
    assert label in reason.message
    assert runtime.containers() == ([neighbour], [])
    stop(runtime, neighbour, 5)
    [ended], _ = runtime.containers()
    runtime.remove(ended)
    assert all_containers(node) == []


@pytest.mark.parametrize("label", CONDITIONAL)
def test_a_container_of_an_earlier_release_is_adopted_without_its_images_labels(
    node: DockerNode, runtime: DockerRuntime, label: str
) -> None:
    image = labelled(node, label.partition(".")[2], **{label: LABELS[label]})
    given = assignment(image=image)
    made = create_as_an_earlier_release(node, runtime, given)
    neighbour = start(runtime, assignment())
    ours, orphans = runtime.containers()
    assert orphans == []
    [adopted] = [one for one in ours if one.container_id == made]
    assert (adopted.instance_id, adopted.status) == (given.instance_id, "running")
    assert (adopted.gpu_uuids, adopted.parent_gpus, adopted.share, adopted.endpoints) == ((), (), None, ())
    for one in (adopted, neighbour):
        end(runtime, one)
    assert all_containers(node) == []


def status_of(runtime: DockerRuntime, one: Container) -> str | None:
    return next(
        (each.status for each in runtime.containers()[0] if each.container_id == one.container_id), None
    )


def test_labels_with_gpus_claim_none_and_do_not_skip_the_release_gate(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    """A container without GPUs, whose image has labels with a GPU of the node."""
    image = labelled(node, "claims", **{"mooring.cards": VICTIM_GPU, "mooring.gpus": VICTIM_GPU})
    hostile = create_as_an_earlier_release(node, runtime, assignment(image=image))
    victim = assignment(instance_id="victim", gpu_uuids=(VICTIM_GPU,))
    containers, _ = runtime.containers()
    assert [one.container_id for one in containers] == [hostile]
    assert plan_of(containers, victim) == (Start(victim),)
    # When the victim's container has ended, its GPU goes through the release gate all the same.
    ended = Container("victim", 1, "c" * 64, "exited", (VICTIM_GPU,), exit_code=0)
    assert Release(ended, (VICTIM_GPU,)) in plan_of([*containers, ended], victim)


@pytest.mark.parametrize("name", [None, "mooring-inst-victim-8", "mooring-inst-victim-7"])
def test_a_container_created_outside_of_mooring_is_an_orphan(
    node: DockerNode, runtime: DockerRuntime, name: str | None
) -> None:
    image = labelled(node, "full", **LABELS)
    with run_with_docker(node, image, name) as foreign:
        containers, orphans = runtime.containers()
        assert containers == []
        assert [orphan.container_id for orphan in orphans] == [foreign]
        victim = assignment(instance_id="victim", gpu_uuids=(VICTIM_GPU,))
        assert plan_of(containers, victim) == (Start(victim),)


@pytest.mark.parametrize(
    "value", ["\u0000", "\x1b[2J", "\ud7ff\ue000\U0001f4a3", "x" * 100_000, "٣", "9" * 5000, "-1", "1.5", ""]
)
@pytest.mark.parametrize("label", ["mooring.instance", "mooring.attempt", "mooring.control_plane"])
def test_no_label_of_a_foreign_container_breaks_the_listing(
    node: DockerNode, runtime: DockerRuntime, label: str, value: str
) -> None:
    neighbour = start(runtime, assignment())
    odd = {**LABELS, label: value}
    made = create_by_hand(node, assignment(instance_id="odd"), labels=odd)
    containers, orphans = runtime.containers()
    assert containers == [neighbour]
    assert [orphan.container_id for orphan in orphans] == [made]
    assert len(json.dumps(orphans[0].model_dump())) < 2000


# --- the whole node, with the agent


def test_other_instances_start_and_stop_beside_a_hostile_image(
    node: DockerNode, runtime: DockerRuntime, tmp_path: Path
) -> None:
    hostile = assignment(image=labelled(node, "boom", **LABELS))
    first, second, late = assignment(), assignment(), assignment()
    with agent_with(runtime, SimulatedGpuReader("gpu-1", 1), lambda _: None, tmp_path) as server:
        server.wants(first, second)
        wait_until(lambda: server.phase(first) == server.phase(second) == "running")
        server.wants(first, second, hostile)
        wait_until(lambda: server.phase(hostile) == "refused", 30)
        stopped = first.model_copy(update={"want": "stopped", "may_start": False})
        server.wants(stopped, hostile, late)
        wait_until(lambda: server.phase(first) == "exited" and server.phase(late) == "running", 30)
        assert server.phase(second) in {"running", None}
        _, report = server.reports[-1]
        assert report.problem is None


# --- the rest of an image's configuration


def test_health_checks_stop_signals_and_core_dumps_of_an_image_have_no_effect(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    image = image_of_config(
        node,
        "behaviour",
        Healthcheck={"Test": ["CMD-SHELL", "touch /tmp/checked"], "Interval": 1_000_000},
        StopSignal="SIGUSR1",
        WorkingDir="home/user/../user",
    )
    command = ["sh", "-c", "trap 'exit 7' TERM; trap '' USR1; while :; do sleep 0.1; done"]
    container = start(runtime, assignment(image=image, command=command))
    inspected = node.client.api.inspect_container(container.container_id)
    assert inspected["Config"]["Healthcheck"]["Test"] == ["NONE"]
    assert "Health" not in inspected["State"]
    assert output_of(runtime, container, ["sh", "-c", "ulimit -c; ulimit -H -c; pwd"]).split() == [
        "0",
        "0",
        "/home/user",
    ]
    stop(runtime, container, 10)
    assert runtime.containers()[0][0].exit_code == 7


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/fd/8",
        "/proc",
        "//proc/self",
        "/home/../proc/1",
        "proc/self/fd/8",
        "/./sys/fs",
        "/dev/shm/",
    ],
)
def test_no_program_starts_in_a_kernel_filesystem(
    node: DockerNode, runtime: DockerRuntime, path: str
) -> None:
    image = image_of_config(node, "workdir", WorkingDir=path)
    reason = refusal_of(runtime, assignment(image=image))
    assert reason.code == "working_dir_unusable"
    assert "the image's working directory" in reason.message
    assert all_containers(node) == []
    # The working directory of the spec overrides the image's.
    container = start(runtime, assignment(image=image, working_dir="/tmp"))
    assert output_of(runtime, container, ["pwd"]) == "/tmp\n"
    if path.startswith("/"):
        given = assignment(working_dir=path)
        assert refusal_of(runtime, given).code == "working_dir_unusable"


def test_labels_of_an_image_have_empty_values_on_its_container(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    """Reverse proxies, updaters and other programs on a node act on labels."""
    image = labelled(node, "obeyed", **{"traefik.enable": "true", "maintainer": "x" * 100_000})
    container = start(runtime, assignment(image=image))
    found = node.client.api.inspect_container(container.container_id)["Config"]["Labels"]
    assert (found["traefik.enable"], found["maintainer"]) == ("", "")
    assert found["mooring.instance"] == container.instance_id


@pytest.mark.parametrize(
    "config",
    [
        {
            "Env": [
                "NVIDIA_GDS",
                "=odd",
                "DOCKER_RESOURCE_X",
                "A",
                "",
                "MOORING_INSTANCE_ID=other",
                "LANG=\u00e4",
            ]
        },
        {"ExposedPorts": {"80": {}, "53/sctp": {}, "8080/tcp": {}}},
        {"User": "0:0", "Labels": {"": "x", "\U0001f4a3": "y"}},
    ],
)
def test_odd_configurations_run_or_are_rejected_without_effect_on_others(
    node: DockerNode, runtime: DockerRuntime, config: dict[str, Any]
) -> None:
    neighbour = start(runtime, assignment())
    image = image_of_config(node, "odd", **config)
    try:
        odd = [start(runtime, assignment(image=image))]
    except StartRefused:
        odd = []
    containers, orphans = runtime.containers()
    assert sorted(one.container_id for one in containers) == sorted(
        one.container_id for one in [neighbour, *odd]
    )
    assert orphans == []
    assert all(one.endpoints == () for one in containers)
    for one in odd:
        assert f"MOORING_INSTANCE_ID={one.instance_id}" in output_of(runtime, one, ["env"])


@pytest.mark.parametrize(
    "config",
    [
        {"User": "u" * 300_000},
        {"Entrypoint": ["/x" * 2000]},
        {"Entrypoint": ["no\u0007such\u001b[2J"]},
    ],
)
def test_quotes_of_an_image_in_an_error_are_short_and_printable(
    node: DockerNode, runtime: DockerRuntime, config: dict[str, Any]
) -> None:
    image = image_of_config(node, "quoted", **config)
    reason = refusal_of(runtime, assignment(image=image, command=None))
    assert len(reason.message) < 3000
    assert reason.message.isprintable()
    assert all_containers(node) == []


def test_device_variables_of_an_image_are_removed(node: DockerNode, runtime: DockerRuntime) -> None:
    image = image_with(node, "baked-all", ["ENV NVIDIA_GDS=enabled MOORING_SIMULATED_GPUS=GPU-x KEPT=1"])
    inside = output_of(runtime, start(runtime, assignment(image=image)), ["env"])
    assert "KEPT=1" in inside
    assert "NVIDIA_GDS" not in inside and "MOORING_SIMULATED_GPUS" not in inside
