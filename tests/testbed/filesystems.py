"""Loop-mounted filesystems for Docker's data. On btrfs and xfs, Docker can limit what a container writes.

A kernel that proves to lack the filesystem or its quotas is the only reason for which a test may be skipped
under CI=true (docs/decisions/0015-disk.md).
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.testbed.parts import program, require
from tests.testbed.workspace import Workspace


@dataclass(frozen=True)
class Kind:
    """How to make and mount a filesystem. `options` are the mount options that limits require."""

    part: str  # of `parts.PARTS`
    make: tuple[str, ...]
    options: tuple[str, ...] = ()


KINDS = {
    "btrfs": Kind("btrfs", ("mkfs.btrfs", "--quiet")),
    "ext4": Kind("ext4", ("mkfs.ext4", "-q")),
    "xfs": Kind("xfs", ("mkfs.xfs", "-q"), ("pquota",)),
}


def mount(kind: str, file: Path, size_mib: int, point: Path, *, options: tuple[str, ...] = ()) -> str:
    """Make a filesystem in this file and mount it. Return the error of `mount`, or ""."""
    with file.open("wb") as image:
        image.truncate(size_mib * 2**20)
    maker, *arguments = KINDS[kind].make
    subprocess.run([program(maker), *arguments, str(file)], check=True, capture_output=True)
    point.mkdir(exist_ok=True)
    wanted = ",".join(("loop", *options))
    mounted = subprocess.run(
        [program("mount"), "-t", kind, "-o", wanted, str(file), str(point)],
        check=False,
        capture_output=True,
        text=True,
    )
    return mounted.stderr.strip() if mounted.returncode else ""


def require_filesystem(workspace: Workspace, kind: str) -> None:
    """Skip the test, also under CI=true, if mounts prove that the kernel lacks the feature.

    Any other failure, such as a missing program or a sandbox, is an error under CI=true.
    """
    require("docker")
    require(KINDS[kind].part)
    options = KINDS[kind].options
    why = _trial(workspace, kind, options)
    if not why:
        return
    reason = f"{kind} cannot be mounted here with {options or 'no options'}: {why}"
    lacks_option = bool(options) and not _trial(workspace, kind, ())
    lacks_filesystem = f"\t{kind}\n" not in Path("/proc/filesystems").read_text()
    if os.environ.get("CI") == "true" and not (lacks_option or lacks_filesystem):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _trial(workspace: Workspace, kind: str, options: tuple[str, ...]) -> str:
    """Try to mount a filesystem, then remove it. Return the error of `mount`, or ""."""
    with TemporaryDirectory(dir=workspace.root) as name:
        folder = Path(name)
        why = mount(kind, folder / "image", 400, folder / "point", options=options)
        if not why:
            subprocess.run([program("umount"), str(folder / "point")], check=True)
    return why


@contextmanager
def small_file_system(point: Path, size_mib: int) -> Iterator[Path]:
    """A file system in memory; root only."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    point.mkdir()
    options = ["-o", f"size={size_mib}m"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def fill(path: Path) -> None:
    """Use all free space of the file system of this new file."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def take_all_space(path: Path) -> None:
    """Allocate all free blocks without writing them."""
    with path.open("wb") as file:
        statistics = os.fstatvfs(file.fileno())
        size, step = 0, statistics.f_bavail * statistics.f_frsize
        while step > 4096:
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), size, step)
                size += step
                continue
            step //= 2
