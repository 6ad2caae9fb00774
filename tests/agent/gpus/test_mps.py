"""MPS: the environment of programs with a share, and which daemons are used."""

import os
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
from mooring.core.instance.spec import InstanceRequest
from mooring.schemas.agent import Assignment
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    image_with,
    output_of,
    runtime_on,
    start,
)
from tests.agent.grants import GPU, MIG_A, with_gpus, with_mig, with_share
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

IMAGE = Image(id="sha256:1", digest="sha256:2")


MOUNTED = "nosuid,nodev,noexec,size=16m,mode=0755"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A separate filesystem, mounted as docs/operating.md describes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", MOUNTED, "mooring-mps", str(tmp_path)], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


# --- the environment of a container


def variables_of(given: Assignment, image: Image = IMAGE, **abilities: Any) -> dict[str, str]:
    entries = environment(given, image, Abilities(mps=Mps(Path("/run/mps")), **abilities))
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_mps_enforces_the_limits_of_the_share() -> None:
    variables = variables_of(with_share(assignment(), 20_389, milli=250, isolation="mps"))
    assert {name: value for name, value in variables.items() if name.startswith("CUDA_MPS_")} == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20389M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert variables["NVIDIA_VISIBLE_DEVICES"] == GPU


@pytest.mark.parametrize(("milli", "percent"), [(1, "1"), (125, "12"), (999, "99")])
def test_the_thread_percentage_is_rounded_down_to_at_least_one(milli: int, percent: str) -> None:
    variables = variables_of(with_share(assignment(), milli=milli, isolation="mps"))
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent


@pytest.mark.parametrize(
    "given",
    [with_share(assignment()), with_gpus(assignment(), GPU), with_mig(assignment(), MIG_A), assignment()],
)
def test_only_a_share_under_mps_uses_mps(given: Assignment) -> None:
    assert not any(name.startswith("CUDA_MPS_") for name in variables_of(given))
    host = container_config(given, IMAGE, Abilities(), ContainerLimits(), CONTROL_PLANE)["HostConfig"]
    assert "Mounts" not in host


def test_simulated_gpus_have_no_mps() -> None:
    given = with_share(assignment(), isolation="mps")
    assert not any(name.startswith("CUDA_MPS_") for name in variables_of(given, simulated_gpus=True))


def test_an_image_cannot_override_the_limits() -> None:
    image = Image(
        id="1", digest=None, env=("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_CLIENT_PRIORITY=0")
    )
    given = with_share(assignment(), isolation="mps")
    entries = environment(given, image, Abilities())
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in entries
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in entries
    assert "CUDA_MPS_CLIENT_PRIORITY" in entries  # a name without = unsets it
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment(assignment(), image, Abilities())


@pytest.mark.parametrize("name", ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_PIPE_DIRECTORY"])
def test_users_cannot_set_limits(name: str) -> None:
    with pytest.raises(ValueError, match="is set by Mooring itself"):
        InstanceRequest.model_validate({"image": "a", "env": {name: "x"}})


def test_the_container_mounts_the_operators_directories() -> None:
    given = with_share(assignment(), isolation="mps")
    config = container_config(
        given, IMAGE, Abilities(mps=Mps(Path("/run/mps"))), ContainerLimits(), CONTROL_PLANE
    )
    mounts = [(one["Type"], one["Source"], one["Target"]) for one in config["HostConfig"]["Mounts"]]
    assert mounts == [("bind", "/run/mps", "/run/mps"), ("bind", "/run/mps/shm", "/dev/shm")]
    assert config["HostConfig"]["IpcMode"] == "private"
    assert "Binds" not in config["HostConfig"]


# --- the daemon of MPS

# Listens like the real one, but does not implement NVIDIA's protocol, which these tests do not use.
DAEMON = """
import os, signal, socket, sys
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.bind(sys.argv[1] + "/control")
os.setuid(int(sys.argv[2]))
control.listen()
print("listening", flush=True)
signal.pause()
"""


@contextmanager
def daemon(pipe: Path, *, own_shm: bool = True, uid: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    (pipe / "shm").mkdir(parents=True, exist_ok=True)
    script = 'if [ "$1" = own ]; then mount --bind "$2/shm" /dev/shm; fi; shift; exec "$0" -c "$3" "$1" "$2"'
    shm = "own" if own_shm else "the host's"
    argv = ["unshare", "--mount", "sh", "-c", script, sys.executable, shm, str(pipe), str(uid), DAEMON]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == b"listening\n"
        yield running
    finally:
        running.kill()
        running.communicate()
        (pipe / "control").unlink()


def why_not(pipe: Path) -> str:
    with pytest.raises(MpsUnavailableError) as caught:
        Daemon(pipe).check()
    assert not Mps(pipe).answers()
    return str(caught.value)


def test_a_running_daemon_is_used(tmp_path: Path) -> None:
    with daemon(tmp_path):
        Daemon(tmp_path).check()
        assert Mps(tmp_path).answers()


def test_each_gpu_may_have_its_own_daemon(tmp_path: Path) -> None:
    gpus: list[str] = []
    mps = Mps(tmp_path / "{gpu}", lambda: gpus)
    assert not mps.answers()  # no GPU is known yet
    with daemon(tmp_path / "GPU-a"):
        gpus.append("GPU-a")
        assert mps.answers()
        gpus.append("GPU-b")
        assert not mps.answers()
        mps.require(["GPU-a"], Share("mps", 250, 20_000, "prj_1"))
        with pytest.raises(StartDelayed):
            mps.require(["GPU-b"], Share("mps", 250, 20_000, "prj_1"))
    given = with_share(assignment(), isolation="mps", gpu="GPU-a")
    assert f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}/GPU-a" in environment(given, IMAGE, Abilities(mps=mps))


@pytest.mark.parametrize("gpu", ["../etc", "GPU-a/../../etc", ".", ""])
def test_a_gpu_uuid_cannot_select_another_directory(tmp_path: Path, gpu: str) -> None:
    with pytest.raises(MpsUnavailableError):
        Mps(tmp_path / "{gpu}").of(gpu)


def test_without_a_daemon_mps_is_unavailable(tmp_path: Path) -> None:
    assert "there is no" in why_not(tmp_path / "nowhere")
    (tmp_path / "shm").mkdir()
    assert "no MPS daemon answers" in why_not(tmp_path)


def test_a_killed_daemon_leaves_its_socket(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        running.kill()
        running.wait()
        assert (tmp_path / "control").is_socket()
        assert "no MPS daemon answers" in why_not(tmp_path)


def test_a_stopped_daemon_is_not_used(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        os.kill(running.pid, 19)
        wait_until(lambda: not Mps(tmp_path).answers())
        assert "is stopped or dead" in why_not(tmp_path)


def test_a_daemon_with_the_hosts_shared_memory_is_not_used(tmp_path: Path) -> None:
    with daemon(tmp_path, own_shm=False):
        assert "/dev/shm is not" in why_not(tmp_path)


def test_a_daemon_of_another_user_is_not_used(tmp_path: Path) -> None:
    with daemon(tmp_path, uid=1000):
        assert "is of user 1000" in why_not(tmp_path)
    with daemon(tmp_path):
        Daemon(tmp_path).check()
        os.chown(tmp_path, 1000, 1000)
        assert "is of user 1000" in why_not(tmp_path)
        os.chown(tmp_path, 0, 0)
        os.chown(tmp_path / "shm", 1000, 1000)
        assert "is of user 1000" in why_not(tmp_path)


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    with daemon(pipe):
        (tmp_path / "link").symlink_to(pipe)
        assert "is not a directory" in why_not(tmp_path / "link")


# --- what a container can do to the host through the directories


@pytest.mark.parametrize("option", ["suid", "dev"])
def test_directories_that_allow_setuid_or_devices_are_not_used(tmp_path: Path, option: str) -> None:
    with daemon(tmp_path):
        Daemon(tmp_path).check()
        remount(tmp_path, option)
        assert f"without no{option}" in why_not(tmp_path)
        remount(tmp_path, f"no{option}")
        assert Mps(tmp_path).answers()


def test_other_mount_options_are_recommended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with daemon(tmp_path):
        mps = Mps(tmp_path)
        assert mps.answers()
        assert (mps.advice(), caplog.messages) == (None, [])
        remount(tmp_path, "exec")
        assert mps.answers() and mps.answers()
        [message] = caplog.messages
        assert "noexec" in message
        remount(tmp_path, "noexec")


def test_directories_on_a_filesystem_of_the_host_are_a_warning(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("pipe")
    (folder / "shm").mkdir()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        remount(folder, "bind,nosuid,nodev,noexec")
        assert "containers can fill" in str(Daemon(folder).advice())
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_socket_of_a_container_is_not_used(tmp_path: Path) -> None:
    """Its root is the host's root, and it shares /dev/shm."""
    (tmp_path / "shm").mkdir()
    script = 'mount --bind "$1/shm" /dev/shm; exec "$0" -c "$2" "$1" 0'
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    running = subprocess.Popen([*argv, sys.executable, str(tmp_path), DAEMON], stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == b"listening\n"
        assert "is in a container" in why_not(tmp_path)
    finally:
        running.kill()
        running.communicate()


def test_a_link_instead_of_the_socket_is_not_followed(tmp_path: Path) -> None:
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    with daemon(pipe), daemon(other):
        (pipe / "control").rename(pipe / "moved")
        (pipe / "control").symlink_to(pipe / "moved")
        assert "is a link" in why_not(pipe)


# --- with a real engine


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    return tmp_path / "mps"


@pytest.fixture
def runtime(node: DockerNode, pipe: Path) -> Iterator[DockerRuntime]:
    with closing(runtime_on(node, mps=Mps(pipe))) as made:
        yield made


def test_two_containers_share_a_gpu_under_mps(node: DockerNode, runtime: DockerRuntime, pipe: Path) -> None:
    image = image_with(node, "mps", ["ENV CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 KEPT=1"])
    shares = [
        with_share(assignment(image=image), 20_000, milli=250, isolation="mps"),
        with_share(assignment(image=image), 40_000, milli=500, isolation="mps"),
    ]
    with daemon(pipe):
        assert runtime.facts().mps
        first, second = (start(runtime, each) for each in shares)
        for one, memory, threads in ((first, "20000", "25"), (second, "40000", "50")):
            inside = output_of(runtime, one, ["env"]).splitlines()
            assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}M" in inside
            assert f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={threads}" in inside
            assert f"CUDA_MPS_PIPE_DIRECTORY={pipe}" in inside
            assert "KEPT=1" in inside
            assert f"NVIDIA_VISIBLE_DEVICES={GPU}" in inside
        # The daemon and its clients share one folder as /dev/shm, which no other program uses.
        output_of(runtime, first, ["sh", "-c", "echo hello > /dev/shm/cuda.shm"])
        assert output_of(runtime, second, ["cat", "/dev/shm/cuda.shm"]) == "hello\n"
        assert (pipe / "shm" / "cuda.shm").read_text() == "hello\n"
        assert "control" in output_of(runtime, second, ["ls", str(pipe)])
        mounts = [line.split() for line in output_of(runtime, first, ["cat", "/proc/mounts"]).splitlines()]
        options = {target: set(given.split(",")) for _, target, _, given, *_ in mounts}
        for target in (str(pipe), "/dev/shm"):
            assert {"nosuid", "nodev", "noexec", "size=16384k"} <= options[target]


def test_without_the_daemon_the_start_of_an_mps_share_is_delayed(
    node: DockerNode, runtime: DockerRuntime, pipe: Path
) -> None:
    """Otherwise its programs would run without limits."""
    asked = with_share(assignment(), isolation="mps")
    assert not runtime.facts().mps
    with pytest.raises(StartDelayed) as caught:
        start(runtime, asked)
    assert caught.value.reason.code == "mps_unavailable"
    assert runtime.containers() == ([], [])
    with daemon(pipe):
        running = start(runtime, asked)
    runtime.kill(running)
    runtime.kill(running)
    [ended], _ = runtime.containers()
    assert (ended.status, ended.exit_code) == ("exited", 137)
    with pytest.raises(StartDelayed):
        runtime.restart(ended)
