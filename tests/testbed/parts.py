"""The programs that tests need, and what happens if one is missing."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

# Debian's folders for daemons and for PostgreSQL's server, which are often not in PATH, not even for root.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
POSTGRES_FOLDERS = "/usr/lib/postgresql"

# Where tests/testbed/compose.sh puts Docker's compose plugin, and where packages do.
COMPOSE_PLUGINS = (
    Path(__file__).parents[2] / ".testbed" / "compose" / "docker-compose",
    *(
        Path(folder) / "docker" / "cli-plugins" / "docker-compose"
        for folder in ("/usr/libexec", "/usr/lib", "/usr/local/lib")
    ),
)


@dataclass(frozen=True)
class Part:
    """Programs that are required together, and whether they need root."""

    programs: tuple[str, ...]
    needs_root: bool = False


PARTS = {
    "btrfs": Part(("mkfs.btrfs", "mount", "umount"), needs_root=True),
    "compiler": Part(("gcc",)),
    "curl": Part(("bash", "curl", "jq")),
    "debian": Part(("mmdebstrap",), needs_root=True),
    "docker": Part(
        ("dockerd", "containerd", "runc", "busybox", "ip", "iptables", "nsenter"), needs_root=True
    ),
    "ext4": Part(("mkfs.ext4", "mount", "umount"), needs_root=True),
    "musl": Part(("musl-gcc", "gcc", "make", "apt-get"), needs_root=True),
    "postgres": Part(("initdb", "postgres", "setpriv")),
    # Nodes reach the registry over a bridge that only root can make.
    "registry": Part(("docker-registry", "ip"), needs_root=True),
    "ssh": Part(("ssh", "ssh-keygen", "scp", "sftp", "rsync")),
    "xfs": Part(("mkfs.xfs", "mount", "umount"), needs_root=True),
}


def search_path() -> str:
    """Return PATH with the folders of daemons."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS, *_postgres_folders()))


def _postgres_folders() -> list[str]:
    """Return the folders of PostgreSQL, newest version first."""
    versions = Path(POSTGRES_FOLDERS).glob("*/bin")
    return [str(folder) for folder in sorted(versions, key=_major_version, reverse=True)]


def _major_version(binaries: Path) -> float:
    try:
        return float(binaries.parent.name)
    except ValueError:
        return 0


def program(name: str) -> str:
    """Return the path of a program that `require` has found."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise FileNotFoundError(f"{name}: not installed; run tests/testbed/install.sh")
    return found


def compose_plugin() -> Path:
    """Return the path of Docker's compose plugin; without it, `skip` the test."""
    found = next((path for path in COMPOSE_PLUGINS if path.exists()), None)
    return found or skip("docker compose: not installed; run tests/testbed/install.sh")


@cache
def missing(part: str) -> str:
    """Return why a part cannot be used on this machine; "" if it can."""
    wanted = PARTS[part]
    absent = [name for name in wanted.programs if shutil.which(name, path=search_path()) is None]
    if absent:
        return f"{part}: not installed: {', '.join(absent)}; run tests/testbed/install.sh"
    if wanted.needs_root and os.geteuid() != 0:
        return f"{part}: needs root"
    return ""


def require(part: str) -> None:
    """Skip the test if `part` is missing. Under CI=true, fail it: CI must not pass with skipped tests."""
    if reason := missing(part):
        skip(reason)


def skip(reason: str) -> NoReturn:
    """Skip the test; under CI=true, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
