"""MPS: the environment of programs with a share, and which daemons are used."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.device_claims import Share
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config, environment
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.gpus.mps import Daemon, Mps, MpsUnavailableError
from mooring.agent.runtime import StartDelayed
from mooring.schemas.agent import Assignment
from mooring_client.schemas.spec import InstanceRequest
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    image_with,
    output_of,
    runtime_on,
    start,
    the_ended,
)
from tests.agent.grants import GPU, MIG_A, with_gpus, with_mig, with_share
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

IMAGE = Image(id="sha256:1", digest="sha256:2")
MOUNT_OPTIONS = "nosuid,nodev,noexec,size=16m,mode=0755"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of its own, mounted as docs/operating.md describes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", MOUNT_OPTIONS, "mooring-mps", str(tmp_path)], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


# --- the environment of a container


def variables_of(assigned: Assignment, image: Image = IMAGE, **abilities: Any) -> dict[str, str]:
    entries = environment(assigned, image, Abilities(mps=Mps(Path("/run/mps")), **abilities))
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_the_environment_of_an_mps_share_has_its_limits() -> None:
    variables = variables_of(with_share(assignment(), 20_389, milli=250, isolation="mps"))
    assert {name: value for name, value in variables.items() if name.startswith("CUDA_MPS_")} == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20389M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert variables["NVIDIA_VISIBLE_DEVICES"] == GPU


@pytest.mark.parametrize(("milli", "percent"), [(1, "1"), (125, "12"), (999, "99")])
def test_the_thread_percentage_is_rounded_down_but_never_zero(milli: int, percent: str) -> None:
    variables = variables_of(with_share(assignment(), milli=milli, isolation="mps"))
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent


@pytest.mark.parametrize(
    "assigned",
    [with_share(assignment()), with_gpus(assignment(), GPU), with_mig(assignment(), MIG_A), assignment()],
)
def test_without_an_mps_share_a_container_has_nothing_of_mps(assigned: Assignment) -> None:
    assert not any(name.startswith("CUDA_MPS_") for name in variables_of(assigned))
    config = container_config(assigned, IMAGE, Abilities(), ContainerLimits(), CONTROL_PLANE)
    assert "Mounts" not in config["HostConfig"]


def test_simulated_gpus_have_no_mps() -> None:
    variables = variables_of(with_share(assignment(), isolation="mps"), simulated_gpus=True)
    assert not any(name.startswith("CUDA_MPS_") for name in variables)


def test_an_image_cannot_override_the_limits() -> None:
    image = Image(
        id="1", digest=None, env=("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_CLIENT_PRIORITY=0")
    )
    entries = environment(with_share(assignment(), isolation="mps"), image, Abilities())
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in entries
    # An entry without `=` removes the image's variable.
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in entries
    assert "CUDA_MPS_CLIENT_PRIORITY" in entries
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment(assignment(), image, Abilities())


@pytest.mark.parametrize("name", ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_PIPE_DIRECTORY"])
def test_a_request_cannot_set_variables_of_mps(name: str) -> None:
    with pytest.raises(ValueError, match="only Mooring itself may set"):
        InstanceRequest.model_validate({"image": "a", "env": {name: "x"}})


def test_only_the_daemons_directories_are_mounted() -> None:
    assigned, abilities = with_share(assignment(), isolation="mps"), Abilities(mps=Mps(Path("/run/mps")))
    config = container_config(assigned, IMAGE, abilities, ContainerLimits(), CONTROL_PLANE)
    mounts = [(one["Type"], one["Source"], one["Target"]) for one in config["HostConfig"]["Mounts"]]
    assert mounts == [("bind", "/run/mps", "/run/mps"), ("bind", "/run/mps/shm", "/dev/shm")]
    assert config["HostConfig"]["IpcMode"] == "private"
    assert "Binds" not in config["HostConfig"]


# --- the MPS daemon

# Listens like the real one, but does not implement NVIDIA's protocol, which these tests do not use.
# Only root may create the socket; the kernel reports the user that calls `listen`.
DAEMON = """
import os, signal, socket, subprocess, sys
pipe_directory, uid, shared_memory = sys.argv[1:]
if shared_memory == "own":
    subprocess.run(["mount", "--bind", f"{pipe_directory}/shm", "/dev/shm"], check=True)
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.bind(f"{pipe_directory}/control")
os.setuid(int(uid))
control.listen()
print("listening", flush=True)
signal.pause()
"""
NEW_PID_NAMESPACE = ("--pid", "--fork", "--kill-child")


@contextmanager
def running_daemon(
    pipe_directory: Path, *, uid: int = 0, shared_memory: str = "own", namespaces: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    (pipe_directory / "shm").mkdir(parents=True, exist_ok=True)
    python = [sys.executable, "-c", DAEMON, str(pipe_directory), str(uid), shared_memory]
    process = subprocess.Popen(["unshare", "--mount", *namespaces, *python], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield process
    finally:
        process.kill()
        process.communicate()
        (pipe_directory / "control").unlink()


def problem_with(pipe_directory: Path) -> str:
    """Return why the daemon at this directory cannot be used."""
    assert not Mps(pipe_directory).is_available()
    with pytest.raises(MpsUnavailableError) as caught:
        Daemon(pipe_directory).check()
    return str(caught.value)


def test_a_running_daemon_is_used(tmp_path: Path) -> None:
    with running_daemon(tmp_path):
        Daemon(tmp_path).check()
        assert Mps(tmp_path).is_available()


def test_each_gpu_may_have_its_own_daemon(tmp_path: Path) -> None:
    gpus: list[str] = []
    mps = Mps(tmp_path / "{gpu}", lambda: gpus)
    assert not mps.is_available()  # no GPU is known yet
    with running_daemon(tmp_path / "GPU-a"):
        gpus.append("GPU-a")
        assert mps.is_available()
        gpus.append("GPU-b")  # which has no daemon
        assert not mps.is_available()
        mps.require(["GPU-a"], Share("mps", 250, 20_000, "prj_1"))
        with pytest.raises(StartDelayed):
            mps.require(["GPU-b"], Share("mps", 250, 20_000, "prj_1"))
    assigned = with_share(assignment(), isolation="mps", gpu="GPU-a")
    assert f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}/GPU-a" in environment(assigned, IMAGE, Abilities(mps=mps))


@pytest.mark.parametrize("gpu", ["../etc", "GPU-a/../../etc", ".", ""])
def test_a_gpu_uuid_cannot_select_another_directory(tmp_path: Path, gpu: str) -> None:
    with pytest.raises(MpsUnavailableError):
        Mps(tmp_path / "{gpu}").of(gpu)


def test_without_a_daemon_mps_is_unavailable(tmp_path: Path) -> None:
    assert "there is no" in problem_with(tmp_path / "nowhere")
    (tmp_path / "shm").mkdir()
    assert "no MPS daemon answers" in problem_with(tmp_path)


def test_the_socket_of_a_killed_daemon_is_not_used(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / "control").is_socket()
        assert "no MPS daemon answers" in problem_with(tmp_path)


def test_a_stopped_daemon_is_not_used(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not Mps(tmp_path).is_available())
        assert "is stopped or dead" in problem_with(tmp_path)


def test_a_daemon_with_the_hosts_shared_memory_is_not_used(tmp_path: Path) -> None:
    with running_daemon(tmp_path, shared_memory="the host's"):
        assert "/dev/shm is not" in problem_with(tmp_path)


def test_a_daemon_or_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    with running_daemon(tmp_path, uid=1000):
        assert "is of user 1000" in problem_with(tmp_path)
    with running_daemon(tmp_path):
        Daemon(tmp_path).check()
        os.chown(tmp_path, 1000, 1000)
        assert "is of user 1000" in problem_with(tmp_path)
        os.chown(tmp_path, 0, 0)
        os.chown(tmp_path / "shm", 1000, 1000)
        assert "is of user 1000" in problem_with(tmp_path)


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    pipe_directory = tmp_path / "pipe"
    with running_daemon(pipe_directory):
        (tmp_path / "link").symlink_to(pipe_directory)
        assert "is not a directory" in problem_with(tmp_path / "link")


# --- what a container can do to the host through the directories


@pytest.mark.parametrize("option", ["suid", "dev"])
def test_directories_that_allow_setuid_or_devices_are_not_used(tmp_path: Path, option: str) -> None:
    with running_daemon(tmp_path):
        Daemon(tmp_path).check()
        remount(tmp_path, option)
        assert f"without no{option}" in problem_with(tmp_path)
        remount(tmp_path, f"no{option}")
        assert Mps(tmp_path).is_available()


def test_directories_without_noexec_are_used_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_daemon(tmp_path):
        mps = Mps(tmp_path)
        assert mps.is_available()
        assert (mps.advice(), caplog.messages) == (None, [])
        remount(tmp_path, "exec")
        for _ in range(2):
            assert mps.is_available()
        [message] = caplog.messages
        assert "noexec" in message


def test_the_operator_is_advised_against_a_file_system_of_the_host(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("pipe")
    (folder / "shm").mkdir()
    # The bind mount has options of its own, on the file system that holds the folder.
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        remount(folder, "bind,nosuid,nodev,noexec")
        assert "containers can fill" in str(Daemon(folder).advice())
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_socket_of_a_container_is_not_used(tmp_path: Path) -> None:
    """A container's root has the host's user id 0, and can have the right /dev/shm."""
    with running_daemon(tmp_path, namespaces=NEW_PID_NAMESPACE):
        assert "is in a container" in problem_with(tmp_path)


def test_a_link_instead_of_the_socket_is_not_followed(tmp_path: Path) -> None:
    with running_daemon(tmp_path):
        (tmp_path / "control").rename(tmp_path / "moved")
        (tmp_path / "control").symlink_to(tmp_path / "moved")
        assert "is a link" in problem_with(tmp_path)


# --- with a real engine


@pytest.fixture
def pipe_directory(tmp_path: Path) -> Path:
    return tmp_path / "mps"


@pytest.fixture
def runtime(node: DockerNode, pipe_directory: Path) -> Iterator[DockerRuntime]:
    with closing(runtime_on(node, mps=Mps(pipe_directory))) as made:
        yield made


def test_two_containers_share_a_gpu_under_mps(
    node: DockerNode, runtime: DockerRuntime, pipe_directory: Path
) -> None:
    image = image_with(node, "mps", ["ENV CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 KEPT=1"])
    shares = [
        with_share(assignment(image=image), 20_000, milli=250, isolation="mps"),
        with_share(assignment(image=image), 40_000, milli=500, isolation="mps"),
    ]
    with running_daemon(pipe_directory):
        assert runtime.facts().mps
        first, second = (start(runtime, share) for share in shares)
        for container, memory, threads in ((first, "20000", "25"), (second, "40000", "50")):
            variables = output_of(runtime, container, ["env"]).splitlines()
            assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}M" in variables
            assert f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={threads}" in variables
            assert f"CUDA_MPS_PIPE_DIRECTORY={pipe_directory}" in variables
            assert "KEPT=1" in variables
            assert f"NVIDIA_VISIBLE_DEVICES={GPU}" in variables
        # The daemon's directory `shm` is /dev/shm in both containers.
        output_of(runtime, first, ["sh", "-c", "echo hello > /dev/shm/cuda.shm"])
        assert output_of(runtime, second, ["cat", "/dev/shm/cuda.shm"]) == "hello\n"
        assert (pipe_directory / "shm" / "cuda.shm").read_text() == "hello\n"
        assert "control" in output_of(runtime, second, ["ls", str(pipe_directory)])
        mounts = [line.split() for line in output_of(runtime, first, ["cat", "/proc/mounts"]).splitlines()]
        options_of = {target: set(options.split(",")) for _, target, _, options, *_ in mounts}
        for target in (str(pipe_directory), "/dev/shm"):
            assert {"nosuid", "nodev", "noexec", "size=16384k"} <= options_of[target]


def test_without_the_daemon_an_mps_share_is_neither_started_nor_restarted(
    runtime: DockerRuntime, pipe_directory: Path
) -> None:
    """Its programs would run without limits."""
    share = with_share(assignment(), isolation="mps")
    assert not runtime.facts().mps
    with pytest.raises(StartDelayed) as caught:
        start(runtime, share)
    assert caught.value.reason.code == "mps_unavailable"
    assert runtime.containers() == ([], [])
    with running_daemon(pipe_directory):
        running = start(runtime, share)
    runtime.kill(running)
    ended = the_ended(runtime)
    assert ended.exit_code == 137
    with pytest.raises(StartDelayed):
        runtime.restart(ended)
