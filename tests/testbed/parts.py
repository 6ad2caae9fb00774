"""The real parts that tests need, and what happens where one is missing."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

# Where Debian keeps daemons and PostgreSQL's server: outside the PATH of many callers, root's included.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
POSTGRES_FOLDERS = "/usr/lib/postgresql"


@dataclass(frozen=True)
class Part:
    """Programs that must be there together, and whether only root can use them."""

    programs: tuple[str, ...]
    needs_root: bool = False


PARTS = {
    "btrfs": Part(("mkfs.btrfs", "mount", "umount"), needs_root=True),
    "compiler": Part(("gcc",)),
    "curl": Part(("bash", "curl", "jq")),
    "docker": Part(
        ("dockerd", "containerd", "runc", "busybox", "ip", "iptables", "nsenter"), needs_root=True
    ),
    "ext4": Part(("mkfs.ext4", "mount", "umount"), needs_root=True),
    "postgres": Part(("initdb", "postgres", "setpriv")),
    # Nodes reach the registry over the root side of their network, which only root can make.
    "registry": Part(("docker-registry", "ip"), needs_root=True),
    "xfs": Part(("mkfs.xfs", "mount", "umount"), needs_root=True),
}


def search_path() -> str:
    """PATH with the folders in which a daemon may be."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS, *_postgres_folders()))


def _postgres_folders() -> list[str]:
    """The newest server first."""
    versions = Path(POSTGRES_FOLDERS).glob("*/bin")
    return [str(folder) for folder in sorted(versions, key=_major_version, reverse=True)]


def _major_version(binaries: Path) -> float:
    try:
        return float(binaries.parent.name)
    except ValueError:
        return 0


def program(name: str) -> str:
    """The path of a program that `require` has found."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise FileNotFoundError(f"{name}: not installed; run tests/testbed/install.sh")
    return found


@cache
def missing(part: str) -> str:
    """What keeps a part from being used here; empty when nothing does."""
    wanted = PARTS[part]
    absent = [name for name in wanted.programs if shutil.which(name, path=search_path()) is None]
    if absent:
        return f"{part}: not installed: {', '.join(absent)}; run tests/testbed/install.sh"
    if wanted.needs_root and os.geteuid() != 0:
        return f"{part}: needs root"
    return ""


def require(part: str) -> None:
    """Skips the test where `part` is missing; under CI=true fails it: CI never passes on skipped tests."""
    reason = missing(part)
    if not reason:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
