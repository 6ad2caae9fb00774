"""What options of Docker clients become, and which are refused."""

import copy
from typing import Any

import pytest

from mooring.gateway.docker.create import converted, instance_name
from mooring_client.errors import BadRequest

# As `docker run -it` of CLI 28 sends it.
BODY: dict[str, Any] = {
    "Hostname": "", "Domainname": "", "User": "", "AttachStdin": True, "AttachStdout": True,
    "AttachStderr": True, "Tty": True, "OpenStdin": True, "StdinOnce": True, "Env": None, "Cmd": ["sh"],
    "Image": "busybox", "Volumes": {}, "WorkingDir": "", "Entrypoint": None, "OnBuild": None, "Labels": {},
    "HostConfig": {
        "Binds": None, "ContainerIDFile": "", "LogConfig": {"Type": "", "Config": {}},
        "NetworkMode": "default", "PortBindings": {}, "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": True, "VolumeDriver": "", "VolumesFrom": None, "ConsoleSize": [24, 80], "CapAdd": None,
        "CapDrop": None, "CgroupnsMode": "", "Dns": [], "DnsOptions": [], "DnsSearch": [], "ExtraHosts": None,
        "GroupAdd": None, "IpcMode": "", "Cgroup": "", "Links": None, "OomScoreAdj": 0, "PidMode": "",
        "Privileged": False, "PublishAllPorts": False, "ReadonlyRootfs": False, "SecurityOpt": None,
        "UTSMode": "", "UsernsMode": "", "ShmSize": 0, "Isolation": "", "CpuShares": 0, "Memory": 0,
        "NanoCpus": 0, "CgroupParent": "", "BlkioWeight": 0, "BlkioWeightDevice": [], "Devices": [],
        "DeviceRequests": None, "MemorySwappiness": -1, "OomKillDisable": False, "PidsLimit": 0,
        "Ulimits": [],
        "CpuCount": 0, "CpuPercent": 0, "IOMaximumIOps": 0, "MaskedPaths": None, "ReadonlyPaths": None,
    },
    "NetworkingConfig": {"EndpointsConfig": {"default": {"IPAMConfig": None, "Aliases": None}}},
}  # fmt: skip


def body(host: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    made = copy.deepcopy(BODY) | fields
    made["HostConfig"] |= host or {}
    return made


def test_a_plain_run_becomes_a_plain_request() -> None:
    made = converted("my_app.1", body())
    assert made.request == {
        "image": "busybox", "labels": {}, "name": "my-app-1", "tty": True, "stdin": True, "attach": True,
        "env": {}, "ports": [], "restart": "never", "command": ["sh"],
    }  # fmt: skip
    assert made.auto_remove
    assert made.warnings == []


def test_options_become_fields() -> None:
    request = {"Driver": "", "Count": 2, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
    host = {
        "DeviceRequests": [request], "Memory": 2**30, "NanoCpus": 1_500_000_000, "ShmSize": 2**26,
        "StorageOpt": {"size": "20G"}, "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}]},
        "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 0}, "AutoRemove": False,
    }  # fmt: skip
    labels = {"mooring.model": "H100, A100", "mooring.priority": "70", "mooring.name": "named", "own": "x"}
    made = converted("c", body(host, Labels=labels, Env=["A=b", "T=secret:token"], User="1000"))
    assert made.request["gpus"] == {"count": 2, "model": ["H100", "A100"]}
    assert (made.request["memory_mib"], made.request["cpus"], made.request["shm_mib"]) == (1024, 1.5, 64)
    assert (made.request["disk_mib"], made.request["restart"]) == (20_480, "on_failure")
    assert (made.request["priority"], made.request["name"], made.request["user"]) == (70, "named", "1000")
    assert made.request["env"] == {"A": "b", "T": {"secret": "token"}}
    assert made.request["ports"] == [{"container": 80, "protocol": "tcp", "expose": "proxy"}]
    assert "8080" in made.warnings[0]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"Binds": ["/etc:/etc"]}, "a node's files are not available"),
        ({"Binds": ["data:/data"]}, "named volumes are not available yet"),
        ({"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}]}, "named volumes"),
        ({"Privileged": True}, "no privileges"),
        ({"CapAdd": ["SYS_ADMIN"]}, "CapAdd is not supported"),
        ({"Devices": [{"PathOnHost": "/dev/kmsg"}]}, "Devices is not supported"),
        ({"NetworkMode": "host"}, "--network host is not supported"),
        ({"NetworkMode": "container:x"}, "--network container:x is not supported"),
        ({"NetworkMode": "mine"}, "write `network_mode: bridge`"),
        ({"PidMode": "host"}, "PidMode is not supported"),
        ({"IpcMode": "host"}, "IpcMode is not supported"),
        ({"Runtime": "sysbox"}, "Runtime is not supported"),
        ({"SecurityOpt": ["seccomp=unconfined"]}, "SecurityOpt is not supported"),
        ({"Tmpfs": {"/run": ""}}, "Tmpfs is not supported"),
        ({"NeverHeardOf": 1}, "NeverHeardOf is not supported"),
        ({"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}]}, "--gpus all is not supported"),
        ({"DeviceRequests": [{"DeviceIDs": ["0"], "Capabilities": [["gpu"]]}]}, "the scheduler chooses"),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["x"]}]}, "only a number of GPUs"),
        ({"RestartPolicy": {"Name": "always"}}, "restart policy"),
        ({"LogConfig": {"Type": "syslog"}}, "--log-driver is not supported"),
    ],
)
def test_an_option_is_refused_with_a_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        converted("c", body(changed))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"Labels": {"mooring.nothing": "1"}}, "labels that begin with mooring."),
        ({"Labels": {"mooring.model": "H100"}}, "it needs --gpus"),
        ({"Labels": {"mooring.priority": "much"}}, "is not valid"),
        ({"Image": "NOT VALID"}, "image"),
        ({"Env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "NVIDIA_VISIBLE_DEVICES"),
        ({"Healthcheck": {"Test": ["CMD", "true"]}}, "Healthcheck is not supported"),
        ({"StopSignal": "SIGINT"}, "--stop-signal SIGINT is not supported"),
        ({"Volumes": {"/data": {}}}, "Volumes is not supported"),
        (
            {"NetworkingConfig": {"EndpointsConfig": {"a": {"MacAddress": "x"}}}},
            "--network a is not supported",
        ),
        (
            {"NetworkingConfig": {"EndpointsConfig": {"bridge": {"MacAddress": "x"}}}},
            "MacAddress of the network",
        ),
        ({"NetworkingConfig": {"EndpointsConfig": {"bridge": {"Aliases": ["x"]}}}}, "--network-alias"),
        ({"Cmd": [1]}, "command"),
        ({"HostConfig": []}, "HostConfig must be an object"),
    ],
)
def test_an_invalid_field_is_refused(fields: dict[str, Any], reason: str) -> None:
    made = copy.deepcopy(BODY) | fields
    with pytest.raises(BadRequest, match=reason):
        converted("c", made)


@pytest.mark.parametrize(
    ("name", "expected"), [("a_b.C", "a-b-c"), ("__", "container"), ("x" * 80, "x" * 63)]
)
def test_names_become_dns_labels(name: str, expected: str) -> None:
    assert instance_name(name) == expected
