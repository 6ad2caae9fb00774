"""The container of a pid, from control groups of both versions and from a simulated /proc."""

import os
import subprocess
from pathlib import Path

import pytest

from mooring.agent.gpus.processes import ProcessContainers, container_in

ID = "0123456789abcdef" * 4
OTHER = "f" * 64


@pytest.mark.parametrize(
    "text",
    [
        f"12:pids:/docker/{ID}\n11:memory:/docker/{ID}\n",
        f"3:cpuset:/\n2:cpu,cpuacct:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/docker.service\n",
        f"0::/docker/{ID}\n",
        f"0::/system.slice/docker-{ID}.scope\n",
        f"0::/system.slice/docker-{ID}.scope/init\n",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope\n",
        f"0::/../docker-{ID}.scope\n",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a_2b.slice/cri-containerd-{ID}.scope\n",
        f"0::/kubepods.slice/kubepods-pod9.slice/crio-{ID}.scope\n",
        f"4:memory:/kubepods/besteffort/pod8f2d1c3e-0000-4000-8000-000000000000/{ID}\n",
        f"4:devices:/system.slice/containerd.service/kubepods-burstable-pod1.slice:cri-containerd:{ID}\n",
        f"0::/mooring.slice/{ID}",
        f"0::/docker/{ID}/docker/{OTHER}\n",
    ],
)
def test_a_container_is_found_in_every_cgroup_format(text: str) -> None:
    assert container_in(text) == ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/\n",
        "0::/user.slice/user-0.slice/session-1.scope\n",
        "9:name=systemd:/\n4:memory:/process_api/eece3360f056dce373492b7763c66041\n",
        f"0::/docker/{ID[:-1]}\n",
        f"0::/docker/{ID}0\n",
        f"0::/docker/{ID.upper()}\n",
        f"0::/docker/x{ID}\n",
        "no colons at all",
    ],
)
def test_a_process_outside_containers_has_no_container(text: str) -> None:
    assert container_in(text) is None


def _write_process(proc: Path, pid: int, started_at: int, cgroup: str, name: str = "python") -> None:
    """Write /proc/<pid> of a process that started at this clock tick."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} ({name}) S 1 {' '.join(['7'] * 17)} {started_at} 0 0\n")
    (folder / "cgroup").write_text(cgroup)


def test_the_container_of_a_process_is_cached(tmp_path: Path) -> None:
    containers = ProcessContainers(tmp_path)
    _write_process(tmp_path, 7, 1000, f"0::/docker/{ID}\n")
    assert containers.container_of(7) == ID
    (tmp_path / "7" / "cgroup").unlink()
    assert containers.container_of(7) == ID


def test_a_reused_pid_is_looked_up_again(tmp_path: Path) -> None:
    containers = ProcessContainers(tmp_path)
    _write_process(tmp_path, 7, 1000, f"0::/docker/{ID}\n")
    assert containers.container_of(7) == ID
    _write_process(tmp_path, 7, 2000, f"0::/docker/{OTHER}\n")
    assert containers.container_of(7) == OTHER


def test_the_start_time_is_read_after_a_name_with_parentheses(tmp_path: Path) -> None:
    containers = ProcessContainers(tmp_path)
    _write_process(tmp_path, 7, 1000, f"0::/docker/{ID}\n", name="a) b (c) 1 2 3")
    assert containers.container_of(7) == ID
    _write_process(tmp_path, 7, 2000, "0::/\n", name="a) b (c) 1 2 3")
    assert containers.container_of(7) is None


def test_an_ended_process_has_no_container(tmp_path: Path) -> None:
    containers = ProcessContainers(tmp_path)
    _write_process(tmp_path, 7, 1000, f"0::/docker/{ID}\n")
    assert containers.container_of(7) == ID
    (tmp_path / "7" / "stat").unlink()
    assert containers.container_of(7) is None


def test_the_size_of_the_cache_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooring.agent.gpus.processes.MAX_CACHED", 3)
    containers = ProcessContainers(tmp_path)
    for pid in range(1, 10):
        _write_process(tmp_path, pid, 1, f"0::/docker/{ID}\n")
        assert containers.container_of(pid) == ID
    assert len(containers._cached) <= 3


def test_processes_of_this_machine_are_read() -> None:
    containers = ProcessContainers()
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert containers.container_of(ended.pid) is None
    assert containers.container_of(os.getpid()) == container_in(Path("/proc/self/cgroup").read_text())
