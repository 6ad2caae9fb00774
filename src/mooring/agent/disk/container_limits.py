"""Disk limits of a container, as parts of "create container". Pure.

The storage driver limits the container's own layer (`StorageOpt`), but not the anonymous volumes of images:
each is masked by a tmpfs, whose pages count as the container's memory.
"""

import posixpath
from collections.abc import Collection, Iterable
from typing import Any, Final

from mooring.agent.runtime import StartRefused
from mooring.core.instance.state import Reason

MOST_VOLUMES: Final = 16
_MOST_PATH: Final = 255
# runc mounts these itself: a volume there breaks the container or hides its confinement.
_KERNELS: Final = ("/proc", "/sys", "/dev")
_MIB: Final = 2**20


def storage_options(
    disk_mib: int | None, *, enforced: bool, driver: str, image_bytes: int
) -> dict[str, dict[str, str]]:
    """`StorageOpt`, if there is a limit and the engine enforces it.

    btrfs limits what the container's snapshot refers to, its image included; overlay2 and zfs only what the
    container writes.
    """
    if disk_mib is None or not enforced:
        return {}
    image_mib = -(-image_bytes // _MIB) if driver == "btrfs" else 0
    return {"StorageOpt": {"size": f"{disk_mib + image_mib}M"}}


def file_size_limits(disk_mib: int | None, memory_mib: int, *, enforced: bool) -> list[dict[str, Any]]:
    """The largest file size, if disk is limited.

    /etc/hosts, /etc/hostname and /etc/resolv.conf are writable files of the host outside the container's
    layer: no storage driver limits them. Files in memory (/dev/shm) may be as large as the memory.
    """
    if disk_mib is None or not enforced:
        return []
    most = max(disk_mib, memory_mib) * _MIB
    return [{"Name": "fsize", "Soft": most, "Hard": most}]


def volume_masks(
    image: str, volumes: Iterable[str], memory_mib: int, taken: Collection[str]
) -> dict[str, str]:
    """`Tmpfs`: by path, the mount options of the tmpfs over each volume of the image.

    Args:
        taken: the paths of Mooring's own mounts.

    Raises:
        StartRefused: `image_volumes_refused`: too many, or at a path that cannot be masked.
    """
    paths = sorted({_cleaned(image, volume) for volume in volumes} - set(taken))
    if len(paths) > MOST_VOLUMES:
        raise _refused(image, f"{len(paths)} volumes, and {MOST_VOLUMES} are the most")
    # `exec`, as on a volume. The memory limit bounds all of them together.
    options = f"rw,nosuid,nodev,exec,mode=1777,size={max(1, memory_mib // 2)}m"
    return dict.fromkeys(paths, options)


def _cleaned(image: str, volume: str) -> str:
    """The path as the engine normalizes it, if it can be masked."""
    if not volume.startswith("/") or len(volume) > _MOST_PATH or not volume.isprintable():
        raise _refused(image, "a volume whose path is not absolute, is too long, or cannot be printed")
    path = "/" + posixpath.normpath(volume).lstrip("/")
    if path == "/" or ":" in path or any(path == top or path.startswith(f"{top}/") for top in _KERNELS):
        raise _refused(image, f"a volume at {path}")
    return path


def _refused(image: str, what: str) -> StartRefused:
    message = f"{image} declares {what}; build it without (VOLUME in its Dockerfile)"
    return StartRefused(Reason(code="image_volumes_refused", message=message))
