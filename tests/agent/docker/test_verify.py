"""R5: a container's devices are compared with the assigned ones; with real containers and device nodes."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.verify import foreign_devices, gpu_minors_in, mismatch
from tests.agent.docker_assignments import assignment, runtime_on, start
from tests.testbed import images
from tests.testbed.dockerd import DockerNode

MINORS = {"GPU-a": 0, "GPU-b": 1}


@pytest.mark.parametrize(
    ("seen", "uuids", "is_mismatch"),
    [
        (None, ["GPU-a"], False),  # the devices are unknown
        (set(), [], False),
        ({0}, ["GPU-a"], False),
        ({0, 1}, ["GPU-a", "GPU-b"], False),
        ({1}, ["GPU-a"], True),
        ({0, 1}, ["GPU-a"], True),
        ({0}, [], True),
        (set(), ["GPU-a"], False),  # root in the container may have removed the device node
        ({7}, ["GPU-unknown"], False),
        ({7, 8}, ["GPU-unknown"], True),
    ],
)
def test_visible_gpus_are_compared_with_assigned_ones(
    seen: set[int] | None, uuids: Any, is_mismatch: bool
) -> None:
    reason = foreign_devices(seen, uuids, MINORS.get)
    assert (reason and reason.code) == ("gpu_mismatch" if is_mismatch else None)


def inspected(
    requests: list[dict[str, Any]] | None, visible: str | None = "void", **host: Any
) -> dict[str, Any]:
    return {
        "HostConfig": {
            "DeviceRequests": requests,
            "Runtime": "runc",
            "Privileged": False,
            "Devices": None,
            **host,
        },
        "Config": {"Env": ["A=1", *([f"NVIDIA_VISIBLE_DEVICES={visible}"] if visible else [])]},
    }


def by_driver(*uuids: str) -> list[dict[str, Any]]:
    return [{"Driver": "nvidia", "Count": 0, "DeviceIDs": list(uuids)}]


def by_cdi(*uuids: str) -> list[dict[str, Any]]:
    return [{"Driver": "cdi", "Count": 0, "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in uuids]}]


@pytest.mark.parametrize(
    ("found", "uuids", "simulated", "is_mismatch"),
    [
        (inspected(None), [], False, False),
        (inspected([]), ["GPU-a"], True, False),
        (inspected(by_driver("GPU-a"), "GPU-a"), ["GPU-a"], False, False),
        (inspected(by_cdi("GPU-a", "GPU-b")), ["GPU-a", "GPU-b"], False, False),
        (inspected(None), ["GPU-a"], False, True),
        (inspected(by_driver("GPU-b"), "GPU-b"), ["GPU-a"], False, True),
        (inspected(by_driver("GPU-a"), "GPU-a,GPU-b"), ["GPU-a"], False, True),
        (inspected(by_driver("GPU-a"), "all"), ["GPU-a"], False, True),
        (inspected(by_cdi("GPU-a", "all")), ["GPU-a"], False, True),
        (inspected([{"Driver": "nvidia", "Count": -1, "DeviceIDs": None}]), [], False, True),
        (inspected(None, "all"), [], False, True),
        (inspected(by_driver("GPU-a"), "void"), ["GPU-a"], False, True),
        (inspected(by_cdi("GPU-a"), "GPU-a"), ["GPU-a"], False, True),
        (inspected(None, None), [], False, True),
        (inspected(by_driver("GPU-a"), "GPU-a"), ["GPU-a"], True, True),
        (inspected(None, Privileged=True), [], False, True),
        (inspected(None, Runtime="nvidia"), [], False, True),
        (inspected(None, Devices=[{"PathOnHost": "/dev/nvidia0"}]), [], False, True),
    ],
)
def test_the_engines_description_is_compared_with_the_assignment(
    found: dict[str, Any], uuids: Any, simulated: bool, is_mismatch: bool
) -> None:
    reason = mismatch(found, uuids, simulated=simulated)
    assert (reason and reason.code) == ("gpu_mismatch" if is_mismatch else None)


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """The /dev of a host with two GPUs: real device nodes, for which no driver has to be installed."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255), ("nvidia-modeset", 254)):
        os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    (folder / "nvidia9").write_text("a file")
    (folder / "nvidia8").symlink_to("nvidia0")
    return folder


def test_device_nodes_of_a_real_container_are_read(docker_node: DockerNode, dev: Path) -> None:
    api = docker_node.client.api
    devices = [f"{dev}/nvidia1:/dev/renamed", f"{dev}/nvidiactl:/dev/nvidiactl"]
    made = api.create_container(
        images.BUSYBOX, ["sleep", "100"], host_config=api.create_host_config(devices=devices)
    )["Id"]
    try:
        api.start(made)
        pid = api.inspect_container(made)["State"]["Pid"]
        assert gpu_minors_in(made, pid, dev=dev) == {1}
        assert gpu_minors_in("another container", pid, dev=dev) is None
        assert gpu_minors_in(made, 0, dev=dev) is None
    finally:
        api.remove_container(made, force=True)


def test_an_instance_without_gpus_has_no_devices(docker_node: DockerNode, dev: Path) -> None:
    runtime = runtime_on(docker_node)
    container = start(runtime, assignment())
    pid = docker_node.client.api.inspect_container(container.container_id)["State"]["Pid"]
    assert gpu_minors_in(container.container_id, pid, dev=dev) == set()
    docker_node.remove_containers()
    runtime.close()


def test_a_host_without_gpus_verifies_nothing(tmp_path: Path) -> None:
    assert gpu_minors_in("any", 1, dev=tmp_path) is None
