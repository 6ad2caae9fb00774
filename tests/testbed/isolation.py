"""Creates and removes a node's kernel objects: its network namespace, control groups and mounts.

All of them have the node's name, so that a later run can find those of a killed run.
"""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.testbed.parts import program
from tests.testbed.processes import kill_all, processes_within
from tests.testbed.waiting import wait_until

NAMESPACES = Path("/run/netns")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
NETWORK_INTERFACES = Path("/sys/class/net")
# Below the folder of a node: type of runtime, namespace, container.
SHIM_ADDRESSES = "run/containerd/*/*/*/address"


def _ip(*arguments: str, namespace: str = "") -> str:
    argv = [program("ip"), *(("-netns", namespace) if namespace else ()), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def make_bridge(name: str, address: str) -> None:
    """Make the bridge of the nodes' network, which has no route out of this machine."""
    if (NETWORK_INTERFACES / name).exists():
        return
    _ip("link", "add", name, "type", "bridge")
    _ip("address", "add", f"{address}/24", "dev", name)
    _ip("link", "set", name, "up")


def make_namespace(name: str, bridge: str, address: str, gateway: str) -> Path:
    """Make a network namespace that is connected to the bridge. Return its file."""
    _ip("netns", "add", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", name, "master", bridge, "up")
    _ip("link", "set", "lo", "up", namespace=name)
    _ip("address", "add", f"{address}/24", "dev", "eth0", namespace=name)
    _ip("link", "set", "eth0", "up", namespace=name)
    _ip("route", "add", "default", "via", gateway, namespace=name)
    return NAMESPACES / name


def set_link(name: str, state: str) -> None:
    """Set a namespace's link "down" (packets are dropped, no connection is refused) or "up"."""
    _ip("link", "set", name, state)


def end_processes(name: str, folder: Path) -> None:
    """Kill all processes of a node: daemons, shims, proxies, containers, and those of tests.

    Daemons and shims have the node's folder as working folder, proxies and agents are in its namespace,
    containers in its control group.
    """
    sockets = shim_sockets(folder)
    kill_all(lambda: _processes_of(name, folder))
    for socket in sockets:
        socket.unlink(missing_ok=True)


def shim_sockets(folder: Path) -> list[Path]:
    """Return the sockets of the shims of a node's containerd, from their state below the node's folder.

    containerd 1.6 has the sockets of all nodes' shims in one folder. Call this before anything is killed: the
    state of a shim is removed when it ends.
    """
    addresses = [*folder.glob(SHIM_ADDRESSES), *folder.glob(f"*/{SHIM_ADDRESSES}")]
    return [Path(address.read_text().removeprefix("unix://")) for address in addresses]


def _processes_of(name: str, folder: Path) -> set[int]:
    return {*processes_within(folder), *_in_namespace(name), *_in_control_groups(name)}


def _in_namespace(name: str) -> list[int]:
    if not (NAMESPACES / name).exists():
        return []
    return [int(pid) for pid in _ip("netns", "pids", name).split()]


def _in_control_groups(name: str) -> list[int]:
    pids: list[int] = []
    for top in _control_groups(name):
        for group in _with_subgroups(top):
            _thaw_and_unthrottle(group)
            # A group may be removed meanwhile, and the processes of a threaded group cannot be read.
            with suppress(OSError):
                pids += map(int, (group / "cgroup.procs").read_text().split())
    return [pid for pid in pids if pid]


def _with_subgroups(top: Path) -> list[Path]:
    """Return parents first. `Path.rglob` raises if a group is removed meanwhile; `os.walk` does not."""
    return [Path(folder) for folder, _folders, _files in os.walk(top)]


def _thaw_and_unthrottle(group: Path) -> None:
    """Without this, SIGKILL would not end a paused container (cgroup v1) or a throttled one."""
    for name, value in (("freezer.state", "THAWED"), ("cpu.cfs_quota_us", "-1"), ("cpu.max", "max")):
        if (group / name).exists():
            with suppress(OSError):
                (group / name).write_text(value)


def _control_groups(name: str) -> list[Path]:
    """Return one group per hierarchy with cgroup v1, one in total with v2."""
    return [path for path in (CONTROL_GROUPS / name, *CONTROL_GROUPS.glob(f"*/{name}")) if path.is_dir()]


def remove_control_groups(name: str) -> None:
    """Remove the groups. They stay busy for a short time after their last process has ended."""
    wait_until(lambda: all(_removed(group) for group in _control_groups(name)), 10, 0.02)


def _removed(group: Path) -> bool:
    try:
        for folder in reversed(_with_subgroups(group)):
            folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def unmount_within(folder: Path) -> None:
    """Unmount in reverse order: later mounts may be on earlier ones."""
    inside = f"{folder}/"
    points = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed(points):
        if point.startswith(inside):
            subprocess.run(["umount", "--lazy", point], check=True)


def clear(name: str, folder: Path) -> None:
    """Remove a node's kernel objects. The caller removes its folder.

    The link is removed first, by name: with its namespace, the kernel would remove it only later.
    """
    end_processes(name, folder)
    unmount_within(folder)
    remove_control_groups(name)
    if (NETWORK_INTERFACES / name).exists():
        _ip("link", "delete", name)
    if (NAMESPACES / name).exists():
        _ip("netns", "delete", name)


def clear_all(prefix: str, folder: Path) -> None:
    """Remove the nodes and the bridge of one workspace, also after a killed run."""
    names = {path.name for path in NAMESPACES.glob(f"{prefix}-*")} if NAMESPACES.exists() else set()
    names |= {path.name for pattern in ("", "*/") for path in CONTROL_GROUPS.glob(f"{pattern}{prefix}-*")}
    for name in names:
        clear(name, folder)
    unmount_within(folder)
    if (NETWORK_INTERFACES / prefix).exists():
        _ip("link", "delete", prefix)
