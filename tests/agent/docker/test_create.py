"""The request that creates a container, field by field."""

from dataclasses import replace
from typing import Any

import pytest

from mooring.agent.docker.create import (
    Abilities,
    ContainerLimits,
    Image,
    command_line,
    container_config,
    device_requests,
    environment,
    spec_hash,
)
from mooring.agent.docker.toolbox_mount import Toolbox
from mooring.agent.runtime import StartRefused
from mooring.schemas.agent import Assignment
from tests.agent.docker_assignments import CONTROL_PLANE, assignment, with_more

IMAGE = Image(id="sha256:1", digest="sha256:2", entrypoint=("e0",), command=("c0",))
CUDA = Image(
    id="sha256:1",
    digest="sha256:2",
    env=(
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_MIG_CONFIG_DEVICES=all",
        "DOCKER_RESOURCE_GPU=GPU-x",
        "PATH=/bin",
    ),
)
NO_CDI = Abilities()
CDI = Abilities(cdi_devices=frozenset({"nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"}))
SIMULATED = Abilities(simulated_gpus=True, cdi_devices=CDI.cdi_devices)


def config_of(given: Assignment, abilities: Abilities = NO_CDI, image: Image = IMAGE) -> dict[str, Any]:
    return container_config(given, image, abilities, ContainerLimits(), CONTROL_PLANE)


# R6: the request must have no other fields than these.
ALLOWED = {
    "Image", "Hostname", "Entrypoint", "Cmd", "WorkingDir", "User", "Env", "Labels", "ExposedPorts", "Tty",
    "OpenStdin", "StdinOnce", "Healthcheck", "StopSignal", "HostConfig", "NetworkingConfig",
}  # fmt: skip
ALLOWED_IN_HOST_CONFIG = {
    "Runtime", "Privileged", "CapDrop", "CapAdd", "SecurityOpt", "NetworkMode", "IpcMode", "Memory",
    "MemorySwap", "NanoCpus", "PidsLimit", "ShmSize", "Ulimits", "LogConfig", "RestartPolicy", "Init",
    "PortBindings", "DeviceRequests",
}  # fmt: skip


def test_a_request_contains_only_listed_fields() -> None:
    config = config_of(assignment(gpu_uuids=("GPU-a",), ports=[{"container": 80}]))
    assert set(config) == ALLOWED
    assert set(config["HostConfig"]) == ALLOWED_IN_HOST_CONFIG


def test_the_toolbox_is_mounted_read_only_at_a_constant_path() -> None:
    image = replace(IMAGE, volumes=("/.mooring", "/data"))
    given = assignment(env={"TOOLBOX": "/x"}, working_dir="/.mooring")
    toolbox = Toolbox("mooring-toolbox-1", "/docker/volumes/1/_data")
    host = config_of(given, Abilities(toolbox=toolbox), image)["HostConfig"]
    assert set(host) == ALLOWED_IN_HOST_CONFIG | {"Mounts", "Tmpfs"}
    assert host["Mounts"] == [
        {
            "Type": "volume",
            "Target": "/.mooring",
            "VolumeOptions": {
                "NoCopy": True,
                "Labels": {"mooring.toolbox": "mount", "mooring.toolbox.files": "mooring-toolbox-1"},
                "DriverConfig": {
                    "Name": "local",
                    "Options": {
                        "type": "overlay",
                        "device": "overlay",
                        "o": "ro,lowerdir=/docker/volumes/1/_data/files:/docker/volumes/1/_data/empty",
                    },
                },
            },
        }
    ]
    assert set(host["Tmpfs"]) == {"/data"}
    assert spec_hash(given) == config_of(given, Abilities())["Labels"]["mooring.spec"]


def test_the_container_is_restricted() -> None:
    host = config_of(assignment())["HostConfig"]
    assert host["Runtime"] == "runc"
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert not {"NET_RAW", "MKNOD", "SYS_ADMIN", "SYS_PTRACE"} & set(host["CapAdd"])
    assert {"CHOWN", "SETUID"} <= set(host["CapAdd"])
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["NetworkMode"] == "mooring-proj-1"
    assert host["Memory"] == host["MemorySwap"] == 64 * 2**20
    assert host["PidsLimit"] == 4096
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["LogConfig"]["Config"] == {"max-size": "50m", "max-file": "3"}
    assert host["IpcMode"] == "private"
    assert host["NanoCpus"] == 1_000_000_000
    assert host["Ulimits"] == [
        {"Name": "nofile", "Soft": 65_536, "Hard": 65_536},
        {"Name": "core", "Soft": 0, "Hard": 0},
    ]


def test_a_strict_project_has_no_capability() -> None:
    host = config_of(with_more(assignment(), security_profile="strict"))["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ({"cpus": 1.5}, "NanoCpus", 1_500_000_000),
        ({}, "ShmSize", 32 * 2**20),
        ({"shm_mib": 48}, "ShmSize", 48 * 2**20),
        (
            {"ports": [{"container": 53, "protocol": "udp"}]},
            "PortBindings",
            {"53/udp": [{"HostIp": "", "HostPort": ""}]},
        ),
    ],
)
def test_the_spec_sets_fields_of_the_host_config(spec: dict[str, Any], field: str, value: Any) -> None:
    assert config_of(assignment(**spec))["HostConfig"][field] == value


@pytest.mark.parametrize(
    ("abilities", "uuids", "requests", "visible"),
    [
        (NO_CDI, (), [], "void"),
        (CDI, (), [], "void"),
        (SIMULATED, (), [], "void"),
        (
            NO_CDI,
            ("GPU-a", "GPU-b"),
            [
                {
                    "Driver": "nvidia",
                    "DeviceIDs": ["GPU-a", "GPU-b"],
                    "Capabilities": [["gpu", "compute", "utility"]],
                }
            ],
            "GPU-a,GPU-b",
        ),
        (
            CDI,
            ("GPU-a", "GPU-b"),
            [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"]}],
            "void",
        ),
        # CDI does not have one of the GPUs: all are requested from the driver.
        (
            CDI,
            ("GPU-a", "GPU-z"),
            [
                {
                    "Driver": "nvidia",
                    "DeviceIDs": ["GPU-a", "GPU-z"],
                    "Capabilities": [["gpu", "compute", "utility"]],
                }
            ],
            "GPU-a,GPU-z",
        ),
        (SIMULATED, ("GPU-a", "GPU-b"), [], "void"),
    ],
)
def test_gpus_are_requested_by_uuid_only(
    abilities: Abilities, uuids: Any, requests: list[dict[str, Any]], visible: str
) -> None:
    assert device_requests(uuids, abilities) == requests
    env = environment(assignment(gpu_uuids=uuids), CUDA, abilities)
    assert [entry for entry in env if entry.startswith("NVIDIA_VISIBLE_DEVICES=")] == [
        f"NVIDIA_VISIBLE_DEVICES={visible}"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA_MIG_CONFIG_DEVICES",
        "NVIDIA_MIG_MONITOR_DEVICES",
        "NVIDIA_IMEX_CHANNELS",
        "NVIDIA_GDS",
        "NVIDIA_MOFED",
        "NVIDIA_NVSWITCH",
        "NVIDIA_GDRCOPY",
        "DOCKER_RESOURCE_GPU",
        "CUDA_MPS_PIPE_DIRECTORY",
        "MOORING_SIMULATED_GPUS",
    ],
)
def test_device_variables_of_an_image_are_unset(name: str) -> None:
    image = Image(id="sha256:1", digest=None, env=(f"{name}=all", "PATH=/bin"))
    for given in (assignment(), assignment(gpu_uuids=("GPU-a",))):
        env = environment(given, image, NO_CDI)
        assert name in env  # a name without `=` removes the variable
        assert not any(entry.startswith(("PATH", f"{name}=")) for entry in env)


def test_health_check_and_stop_signal_are_always_set() -> None:
    config = config_of(assignment())
    assert (config["Healthcheck"], config["StopSignal"]) == ({"Test": ["NONE"]}, "SIGTERM")


@pytest.mark.parametrize(
    ("requested", "of_image", "used"),
    [
        (None, "", ""),
        (None, "app/./src", "/app/src"),
        (None, "/processes", "/processes"),
        ("/tmp/", "/proc", "/tmp"),
        ("/proc", "/app", None),
        (None, "/a/../proc/self/fd/8", None),
        (None, "//sys", None),
        (None, "dev", None),
    ],
)
def test_the_working_directory_is_not_in_a_kernel_file_system(
    requested: str | None, of_image: str, used: str | None
) -> None:
    given, image = assignment(working_dir=requested), Image(id="1", digest=None, working_dir=of_image)
    if used is not None:
        assert config_of(given, image=image)["WorkingDir"] == used
        return
    with pytest.raises(StartRefused) as caught:
        config_of(given, image=image)
    assert caught.value.reason.code == "working_dir_unusable"


def test_labels_of_the_image_are_emptied_and_never_replace_moorings() -> None:
    image = Image(id="1", digest=None, labels=("traefik.enable", "mooring.instance"))
    given = assignment(instance_id="i-9")
    found = config_of(given, image=image)["Labels"]
    assert (found["traefik.enable"], found["mooring.instance"]) == ("", "i-9")


def test_simulated_gpus_and_the_users_variables_are_in_the_environment() -> None:
    env = environment(assignment(gpu_uuids=("GPU-a", "GPU-b"), env={"A": "1=2"}), IMAGE, SIMULATED)
    assert "MOORING_SIMULATED_GPUS=GPU-a,GPU-b" in env
    assert "A=1=2" in env


def test_variables_of_the_user_never_replace_moorings() -> None:
    given = assignment()
    # The API rejects this name, but a copy is not validated.
    spec = given.spec.model_copy(update={"env": {"NVIDIA_VISIBLE_DEVICES": "all"}})
    env = environment(given.model_copy(update={"spec": spec}), IMAGE, NO_CDI)
    assert env.count("NVIDIA_VISIBLE_DEVICES=void") == 1
    assert "NVIDIA_VISIBLE_DEVICES=all" not in env


def test_every_label_that_a_release_has_read_is_set() -> None:
    given = assignment(instance_id="i-9", gpu_uuids=("GPU-a", "GPU-b"))
    assert config_of(given)["Labels"] == {
        "mooring.instance": "i-9",
        "mooring.attempt": "1",
        "mooring.name": given.name,
        "mooring.project": "proj-1",
        "mooring.generation": "7",
        "mooring.spec": spec_hash(given),
        "mooring.gpus": "GPU-a,GPU-b",
        "mooring.image": "sha256:2",
        "mooring.control_plane": CONTROL_PLANE,
        "mooring.group": "",
        "mooring.cards": "",
        "mooring.share": "",
        "mooring.host_ports": "",
        "mooring.secret_env": "",
    }


def test_the_spec_hash_depends_on_the_spec_and_the_gpus_but_not_on_the_generation() -> None:
    one = assignment(env={"A": "1"})
    assert spec_hash(one) == spec_hash(one.model_copy(update={"generation": 99}))
    assert spec_hash(one) != spec_hash(assignment(env={"A": "2"}))
    assert spec_hash(one) != spec_hash(one.model_copy(update={"gpu_uuids": ["GPU-a"]}))


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ({"command": None}, ["e0", "c0"]),
        ({"command": []}, ["e0", "c0"]),
        ({"command": ["a", "b"]}, ["e0", "a", "b"]),
        ({"entrypoint": ["e"], "command": None}, ["e"]),
        ({"entrypoint": ["e"], "command": ["a"]}, ["e", "a"]),
        ({"entrypoint": [], "command": ["a"]}, ["a"]),
    ],
)
def test_command_line(spec: dict[str, Any], command: list[str]) -> None:
    assert command_line(assignment(**spec).spec, IMAGE) == command
