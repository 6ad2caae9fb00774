"""`DockerRuntime` with a real dockerd: starts, and what failed starts leave on the node."""

import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from mooring.agent.docker.create import spec_hash
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, RuntimeUnavailable, StartRefused
from mooring.schemas.agent import Assignment
from tests.agent.docker_assignments import (
    PortsTaken,
    all_containers,
    assignment,
    create_by_hand,
    image_with,
    output_of,
    runtime_on,
    start,
    the_ended,
    with_more,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.waiting import wait_until


def refusal_of(runtime: DockerRuntime, given: Assignment) -> StartRefused:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value


def test_a_started_container_is_restricted_labelled_and_listed(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    given = assignment(gpu_uuids=("GPU-aaaa", "GPU-bbbb"), cpus=0.5)
    container = start(runtime, given)
    assert (container.instance_id, container.attempt, container.status) == (given.instance_id, 1, "running")
    assert container.gpu_uuids == ("GPU-aaaa", "GPU-bbbb")
    assert container.started_at is not None
    assert container.image_digest is None  # it never was in a registry
    assert runtime.containers() == ([container], [])
    inspected = node.client.api.inspect_container(container.container_id)
    assert inspected["Name"] == f"/mooring-{given.instance_id}-1"
    assert inspected["Config"]["Labels"]["mooring.spec"] == spec_hash(given)
    assert inspected["HostConfig"]["NanoCpus"] == 500_000_000
    assert inspected["HostConfig"]["CapDrop"] == ["ALL"]


@pytest.mark.parametrize(
    ("profile", "capabilities"), [("standard", "00000000000404fb"), ("strict", "0" * 16)]
)
def test_root_in_the_container_can_do_what_the_projects_profile_allows(
    runtime: DockerRuntime, profile: str, capabilities: str
) -> None:
    container = start(runtime, with_more(assignment(), security_profile=profile))
    status = output_of(runtime, container, ["cat", "/proc/1/status"])
    assert f"CapEff:\t{capabilities}" in status
    assert f"CapBnd:\t{capabilities}" in status


@pytest.mark.parametrize(("uuids", "visible"), [((), "void"), (("GPU-aaaa",), "GPU-aaaa")])
def test_an_image_that_sets_all_gets_only_the_assigned_gpus(
    runtime: DockerRuntime, cuda_env_image: str, uuids: Any, visible: str
) -> None:
    container = start(runtime, assignment(image=cuda_env_image, gpu_uuids=uuids))
    assert visible_in(runtime, container) == [visible]


def test_device_variables_of_an_image_are_removed(node: DockerNode, runtime: DockerRuntime) -> None:
    baked = ["ENV NVIDIA_MIG_CONFIG_DEVICES=all DOCKER_RESOURCE_GPU=GPU-x KEPT=1"]
    container = start(runtime, assignment(image=image_with(node, "baked", baked)))
    inside = output_of(runtime, container, ["env"])
    assert "KEPT=1" in inside
    assert "NVIDIA_MIG_CONFIG_DEVICES" not in inside
    assert "DOCKER_RESOURCE_GPU" not in inside


def test_simulated_gpus_need_no_driver_and_are_named(node: DockerNode) -> None:
    runtime = runtime_on(node, simulated_gpus=True)
    container = start(runtime, assignment(gpu_uuids=("GPU-sim-1",)))
    inside = output_of(runtime, container, ["env"])
    assert "MOORING_SIMULATED_GPUS=GPU-sim-1" in inside
    assert "NVIDIA_VISIBLE_DEVICES=void" in inside
    assert not node.client.api.inspect_container(container.container_id)["HostConfig"]["DeviceRequests"]
    runtime.close()


def test_a_published_port_is_reachable_at_its_endpoint(runtime: DockerRuntime) -> None:
    served = ["sh", "-c", "echo hello > /tmp/index.html; exec httpd -f -p 80 -h /tmp"]
    container = start(
        runtime, assignment(command=served, ports=[{"container": 80}, {"container": 53, "protocol": "udp"}])
    )
    assert [(endpoint.container, endpoint.protocol) for endpoint in container.endpoints] == [
        (53, "udp"),
        (80, "tcp"),
    ]
    web = container.endpoints[1]
    url = f"http://{web.host}:{web.port}/index.html"
    assert wait_until(lambda: fetched(url)) == b"hello\n"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"command": ["nosuch", "x"]}, "command_not_found"),
        ({"command": ["/no/such"]}, "command_not_found"),
        ({"command": ["/etc/passwd"]}, "command_not_executable"),
        ({"user": "no-such-user"}, "user_not_found"),
        ({"user": "root:no-such-group"}, "user_not_found"),
        ({"working_dir": "/etc/passwd/x"}, "working_dir_unusable"),
    ],
)
def test_a_failed_start_has_a_reason_and_leaves_no_container(
    node: DockerNode, runtime: DockerRuntime, spec: dict[str, Any], code: Any
) -> None:
    refusal = refusal_of(runtime, assignment(**spec))
    assert refusal.reason.code == code
    assert not refusal.wrong_gpus
    assert all_containers(node) == []


def test_a_command_that_is_not_found_is_named(runtime: DockerRuntime) -> None:
    assert "nosuch" in refusal_of(runtime, assignment(command=["nosuch"])).reason.message


def test_an_image_without_a_command_is_rejected(node: DockerNode, runtime: DockerRuntime) -> None:
    image = image_with(node, "idle", [])
    assert refusal_of(runtime, assignment(image=image, command=None)).reason.code == "command_missing"


@pytest.mark.parametrize("code", [127, 126, 1])
def test_a_failing_program_counts_as_started(runtime: DockerRuntime, code: Any) -> None:
    container = start(runtime, assignment(command=["sh", "-c", f"exit {code}"]))
    ended = the_ended(runtime)
    assert (ended.container_id, ended.exit_code) == (container.container_id, code)


def test_a_docker_without_nvidia_driver_is_explained(new_docker_node: NewDockerNode) -> None:
    bare = new_docker_node()
    bare.stop()
    (bare.bin_dir / "nvidia-container-runtime-hook").unlink()
    bare.start()
    runtime = runtime_on(bare)
    assert refusal_of(runtime, assignment(gpu_uuids=("GPU-aaaa",))).reason.code == "gpu_runtime_missing"
    assert all_containers(bare) == []
    runtime.close()


def test_an_occupied_port_is_skipped_a_limited_number_of_times(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    first = start(runtime, assignment(ports=[{"container": 80}])).endpoints[0].port
    # The engine tries ten ports at each of three starts: 15 occupied ports are skipped, 61 are too many.
    with PortsTaken(node, first + 1, first + 15):
        assert start(runtime, assignment(ports=[{"container": 80}])).endpoints[0].port == first + 16
    with PortsTaken(node, first + 17, first + 77):
        assert refusal_of(runtime, assignment(ports=[{"container": 80}])).reason.code == "port_in_use"


def test_a_second_start_adopts_the_running_container(node: DockerNode, runtime: DockerRuntime) -> None:
    given = assignment()
    container = start(runtime, given)
    restarted_agent = runtime_on(node)
    assert start(restarted_agent, given) == container
    restarted_agent.close()


def test_a_created_container_is_started(node: DockerNode, runtime: DockerRuntime) -> None:
    given = assignment()
    created = create_by_hand(node, given)
    container = start(runtime, given)
    assert (container.container_id, container.status) == (created, "running")


def test_an_exited_container_is_not_started_again(node: DockerNode, runtime: DockerRuntime) -> None:
    given = assignment(command=["true"])
    first = start(runtime, given)
    the_ended(runtime)
    again = start(runtime, given)
    assert (again.container_id, again.status, again.exit_code) == (first.container_id, "exited", 0)


@pytest.mark.parametrize("labels", [{}, {"mooring.control_plane": "another"}, {"mooring.spec": "other"}])
def test_a_foreign_container_with_our_name_is_left_alone(
    node: DockerNode, runtime: DockerRuntime, labels: dict[str, str]
) -> None:
    given = assignment()
    foreign = create_by_hand(node, given, labels=labels)
    assert refusal_of(runtime, given).reason.code == "container_name_taken"
    assert all_containers(node) == [foreign]


def test_a_create_that_timed_out_is_adopted_and_never_repeated(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    runtime = runtime_on(node, timeout_s=1)
    given = assignment()
    runtime.facts()

    def freeze_just_before_create() -> bool:
        node.freeze()
        return False

    with pytest.raises(RuntimeUnavailable):
        runtime.start(given, lambda _reason: None, freeze_just_before_create)
    node.thaw()
    created = wait_until(lambda: all_containers(node))
    container = wait_until(lambda: once_available(lambda: start(runtime, given)))
    assert container is not None
    assert [container.container_id] == created == all_containers(node)
    runtime.close()


def test_a_cancelled_start_leaves_no_container(node: DockerNode, runtime: DockerRuntime) -> None:
    cancelled_before_create, cancelled_after_create = iter([True]), iter([False, True])
    for answers in (cancelled_before_create, cancelled_after_create):
        assert runtime.start(assignment(), lambda _reason: None, answers.__next__) is None
        assert all_containers(node) == []


# R5: the devices of a container are verified even if another program created it.
@pytest.mark.parametrize(
    "wrong",
    [
        {"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": ["GPU-other"], "Capabilities": [["gpu"]]}]},
        {"DeviceRequests": [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}]},
        {"DeviceRequests": []},
        {
            "Devices": [
                {"PathOnHost": "/dev/null", "PathInContainer": "/dev/nvidia3", "CgroupPermissions": "rwm"}
            ]
        },
    ],
)
def test_a_container_with_wrong_devices_is_removed_and_its_start_reports_wrong_gpus(
    node: DockerNode, runtime: DockerRuntime, wrong: dict[str, Any]
) -> None:
    given = assignment(gpu_uuids=("GPU-aaaa",))
    create_by_hand(node, given, host=wrong)
    refusal = refusal_of(runtime, given)
    assert (refusal.reason.code, refusal.wrong_gpus) == ("gpu_mismatch", True)
    assert all_containers(node) == []


def test_a_container_with_all_gpus_in_its_environment_is_removed(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    given = assignment()
    create_by_hand(node, given, env=["NVIDIA_VISIBLE_DEVICES=all"])
    assert refusal_of(runtime, given).reason.code == "gpu_mismatch"
    assert all_containers(node) == []


def visible_in(runtime: DockerRuntime, container: Container) -> list[str]:
    lines = output_of(runtime, container, ["env"]).splitlines()
    return [line.split("=", 1)[1] for line in lines if line.startswith("NVIDIA_VISIBLE_DEVICES=")]


def fetched(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def once_available(call: Callable[[], Container]) -> Container | None:
    try:
        return call()
    except RuntimeUnavailable:
        return None
