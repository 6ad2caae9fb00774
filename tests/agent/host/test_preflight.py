"""Checks whether a machine can isolate untrusted containers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.disk.storage import DiskLimits, DiskReport, Space
from mooring.agent.host.firewall import FirewallUnavailable
from mooring.agent.host.preflight import (
    Toolkit,
    checks,
    disk_checks,
    isolation,
    read_toolkit,
    runtime_problem,
    socket_problem,
    toolkit_problem,
    versions_problem,
)
from mooring.agent.host.version_floors import floors, reviewed
from mooring.agent.runtime import RuntimeUnavailable

SAFE = Toolkit((1, 19, 1), unsafe_option=False)
GOOD_INFO = {
    "ServerVersion": "28.5.1",
    "Components": [
        {"Name": "Engine", "Version": "28.5.1"},
        {"Name": "containerd", "Version": "v1.7.29"},
        {"Name": "runc", "Version": "1.3.3"},
    ],
    "DefaultRuntime": "runc",
    "Runtimes": {"runc": {"path": "runc"}, "kata-qemu": {"path": "kata"}},
    "LiveRestoreEnabled": True,
    "CgroupDriver": "cgroupfs",
    "CgroupVersion": "2",
    "InitBinary": "docker-init",
    "InitCommit": {"ID": "de40ad0"},
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "xfs"]],
    "DockerRootDir": "/",
    "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=GPU-a"}],
}
GPU: Any = {"uuid": "GPU-a"}
NVML: Any = {"driver_version": "580.1", "cuda_version": "13.0", "gpus": [GPU], "unreadable": []}


def disk(_info: Any = None, **changes: Any) -> DiskReport:
    """Return the report of a suitable machine's disk."""
    found = DiskReport(
        root="/var/lib/docker",
        driver="overlay2",
        filesystem="xfs",
        limits=DiskLimits(enforced=True),
        space=Space(2_000_000, 1_000_000),
        images_mib=50_000,
        low_mib=20_480,
    )
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("toolkit", "code"),
    [
        (SAFE, None),
        (Toolkit((1, 20, 0), unsafe_option=False), None),
        (Toolkit((2, 0, 0), unsafe_option=False), None),
        (Toolkit((1, 19, 0), unsafe_option=False), "toolkit_too_old"),
        (Toolkit((1, 17, 8), unsafe_option=False), "toolkit_too_old"),
        (Toolkit((1, 9, 99), unsafe_option=False), "toolkit_too_old"),
        (Toolkit(None, unsafe_option=False), "toolkit_missing"),
        (Toolkit((1, 19, 1), unsafe_option=True), "toolkit_unsafe_option"),
    ],
)
def test_an_unsafe_or_missing_toolkit_is_a_problem_of_nodes_with_gpus(toolkit: Toolkit, code: Any) -> None:
    reason = toolkit_problem(toolkit, has_gpus=True)
    assert (reason and reason.code) == code
    assert toolkit_problem(toolkit, has_gpus=False) is None
    assert toolkit_problem(toolkit, has_gpus=True, allow_unsafe_toolkit=True) is None


@pytest.mark.parametrize(
    ("output", "version"),
    [
        (
            "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80a9b9d0db00d9b1d73c0128c8962c55f4d",
            (1, 17, 8),
        ),
        ("NVIDIA Container Toolkit CLI version 1.18.0-rc.1", (1, 18, 0)),
        ("no version here", None),
    ],
)
def test_the_version_is_from_nvidia_ctk(tmp_path: Path, output: str, version: Any) -> None:
    tool = tmp_path / "nvidia-ctk"
    tool.write_text(f"#!/bin/sh\necho '{output}'\n")
    tool.chmod(0o755)
    assert read_toolkit(tmp_path / "none.toml", str(tmp_path)).version == version


def test_a_toolkit_that_is_not_on_the_path_counts_as_missing(tmp_path: Path) -> None:
    assert read_toolkit(tmp_path / "none.toml", str(tmp_path)) == Toolkit(None, unsafe_option=False)


def test_a_toolkit_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    (tmp_path / "nvidia-ctk").write_text("")
    (tmp_path / "nvidia-ctk").chmod(0o755)
    assert read_toolkit(tmp_path / "none.toml", str(tmp_path)).version is None


@pytest.mark.parametrize(
    ("content", "unsafe"),
    [
        ("", False),
        ("[features]\nallow-cuda-compat-libs-from-container = true\n", True),
        ("[features]\nallow-cuda-compat-libs-from-container = false\n", False),
        ("#allow-cuda-compat-libs-from-container = true\n", False),
        ("[invalid toml", True),
    ],
)
def test_the_unsafe_option_is_read_from_the_configuration(tmp_path: Path, content: str, unsafe: bool) -> None:
    config = tmp_path / "config.toml"
    config.write_text(content)
    assert read_toolkit(config, str(tmp_path)).unsafe_option is unsafe


def test_a_suitable_machine_passes_all_checks() -> None:
    found = checks(lambda: GOOD_INFO, disk, SAFE, NVML, environment={})
    assert [check.name for check in found if check.ok is not True] == []


@pytest.mark.parametrize(("runtime", "known"), [("runc", True), ("kata-qemu", True), ("runsc", False)])
def test_a_runtime_unknown_to_docker_is_rejected(runtime: str, known: bool) -> None:
    reason = runtime_problem(GOOD_INFO, runtime)
    assert (reason and reason.code) == (None if known else "runtime_missing")
    found = checks(lambda: GOOD_INFO, disk, SAFE, NVML, environment={}, runtime=runtime)
    assert [check.ok for check in found if check.name == "runtime"] == [known]


@pytest.mark.parametrize(("required", "ok"), [(True, False), (False, None)])
def test_missing_isolation_is_an_error_or_a_warning(required: bool, ok: bool | None) -> None:
    def unavailable() -> bool:
        raise FirewallUnavailable("iptables was not found: install the package iptables")

    found = isolation(unavailable, required=required)
    assert (found.ok, "install the package iptables" in found.remedy) == (ok, True)
    assert isolation(lambda: True, required=required).ok
    assert isolation(lambda: False, required=required).ok


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"DefaultRuntime": "nvidia"}, "default runtime"),
        ({"LiveRestoreEnabled": False}, "live-restore"),
        ({"CgroupDriver": "systemd", "DiscoveredDevices": None}, "cgroups"),
        ({"InitCommit": {"ID": "N/A"}}, "docker-init"),
    ],
)
def test_unsuitable_settings_are_warnings(change: dict[str, Any], name: str) -> None:
    found = {
        check.name: check for check in checks(lambda: GOOD_INFO | change, disk, SAFE, NVML, environment={})
    }
    assert found[name].ok is None
    assert found[name].remedy


@pytest.mark.parametrize(
    ("change", "name", "ok", "words"),
    [
        (
            {"limits": DiskLimits(enforced=False, why_not="pquota")},
            "storage",
            None,
            "cannot be limited (pquota)",
        ),
        ({"space": None}, "disk", None, "cannot see /var/lib/docker"),
        ({"space": Space(100_000, 19_000), "low_mib": 5_000}, "disk", None, "too little for CUDA images"),
        ({"space": Space(100_000, 4_000), "low_mib": 5_000}, "disk", False, "disk pressure"),
    ],
)
def test_problems_of_the_disk(change: dict[str, Any], name: str, ok: bool | None, words: str) -> None:
    found = {check.name: check for check in disk_checks(disk(**change))}
    assert found[name].ok is ok
    assert words in found[name].detail
    assert found[name].remedy
    assert [check.ok for other, check in found.items() if other != name] == [True]


@pytest.mark.parametrize(
    ("environment", "ok"),
    [
        ({}, True),
        ({"DOCKER_HOST": "unix:///x.sock"}, True),
        ({"DOCKER_HOST": "tcp://10.0.0.1:2375"}, False),
        ({"DOCKER_HOST": "tcp://10.0.0.1:2376", "DOCKER_TLS_VERIFY": "1"}, True),
    ],
)
def test_docker_on_plain_tcp(environment: dict[str, str], ok: bool | None) -> None:
    found = {
        check.name: check for check in checks(lambda: GOOD_INFO, disk, SAFE, None, environment=environment)
    }
    assert found["docker socket"].ok is ok
    reason = socket_problem(GOOD_INFO, environment)
    assert (reason and reason.code) == (None if ok else "docker_exposed")


def test_docker_that_listens_on_tcp_beside_its_socket() -> None:
    warning = (
        "WARNING: API is accessible on http://0.0.0.0:2375 without encryption.\n"
        "         Access to the remote API is equivalent to root access on the host."
    )
    reason = socket_problem(GOOD_INFO | {"Warnings": ["WARNING: No swap limit support", warning]}, {})
    assert reason
    assert (reason.code, "http://0.0.0.0:2375" in reason.message) == ("docker_exposed", True)
    assert socket_problem(GOOD_INFO | {"Warnings": ["WARNING: No swap limit support"]}, {}) is None


def _components(**versions: str) -> dict[str, Any]:
    stated = {"Engine": "28.5.1", "containerd": "2.2.0", "runc": "1.4.0"} | versions
    return GOOD_INFO | {"Components": [{"Name": name, "Version": text} for name, text in stated.items()]}


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        ({}, None),
        ({"runc": "1.2.8"}, None),
        ({"runc": "1.2.7"}, "engine_too_old"),
        ({"runc": "1.3.2"}, "engine_too_old"),
        ({"runc": "1.1.5+ds1"}, "engine_too_old"),
        ({"runc": "1.3.0-rc.1"}, "engine_too_old"),
        ({"containerd": "1.7.28"}, "engine_too_old"),
        ({"containerd": "2.1.4"}, "engine_too_old"),
        ({"containerd": "v1.7.29"}, None),
        ({"Engine": "28.2.2"}, "engine_too_old"),
        ({"Engine": "26.1.5+dfsg1"}, None),
        ({"Engine": "20.10.23"}, "engine_too_old"),
        ({"runc": ""}, "engine_version_unknown"),
        ({"containerd": "unknown"}, "engine_version_unknown"),
    ],
)
def test_the_minimum_versions_of_the_engine(versions: dict[str, str], code: str | None) -> None:
    info = _components(**versions)
    reason = versions_problem(info, "runc")
    assert (reason and reason.code) == code
    for allow, ok in ((False, code is None), (True, None if code else True)):
        found = checks(lambda: info, disk, SAFE, NVML, environment={}, allow_unsafe_versions=allow)
        assert next(check.ok for check in found if check.name == "docker") is ok


def test_another_runtime_needs_no_runc() -> None:
    assert versions_problem(_components(runc="1.1.0"), "kata-qemu") is None


def test_an_engine_without_versions_is_rejected() -> None:
    reason = versions_problem({key: value for key, value in GOOD_INFO.items() if key != "Components"}, "runc")
    assert reason
    assert reason.code == "engine_version_unknown"


def test_each_floor_names_its_flaws_and_the_review_is_dated() -> None:
    for floor in floors().values():
        assert floor.flaws
        assert all(flaw.startswith("CVE-") for flaw in floor.flaws)
        assert all(first < fixed for first, fixed in floor.vulnerable)
    assert floors().keys() == {"nvidia-container-toolkit", "runc", "containerd", "docker"}
    assert reviewed().year >= 2026


def test_cdi_that_lists_some_gpus_only() -> None:
    both = NVML | {"gpus": [GPU, {"uuid": "GPU-b"}]}
    found = {check.name: check for check in checks(lambda: GOOD_INFO, disk, SAFE, both, environment={})}
    assert found["cdi"].ok is None
    assert "GPU-b" in found["cdi"].detail


def test_an_unavailable_engine_does_not_hide_the_checks_of_gpus() -> None:
    def unavailable() -> dict[str, Any]:
        raise RuntimeUnavailable("the container engine does not answer")

    fault: Any = {"code": "driver_not_loaded", "message": "the driver is not loaded"}
    found = checks(unavailable, disk, Toolkit(None, unsafe_option=False), fault, environment={})
    assert [(check.name, check.ok) for check in found] == [
        ("docker", False),
        ("nvidia driver", False),
        ("nvidia-container-toolkit", True),
    ]


def test_an_old_toolkit_is_an_error_or_if_allowed_a_warning() -> None:
    old = Toolkit((1, 14, 0), unsafe_option=False)
    for allow, ok in ((False, False), (True, None)):
        found = checks(lambda: GOOD_INFO, disk, old, NVML, environment={}, allow_unsafe_toolkit=allow)
        assert [check.ok for check in found if check.name == "nvidia-container-toolkit"] == [ok]
