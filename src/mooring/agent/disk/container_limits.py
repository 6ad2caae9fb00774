"""Disk limits of a container, as parts of the request that creates it. Pure.

The storage driver limits the container's own layer (`StorageOpt`), but not the anonymous volumes of images.
Each volume is masked by a tmpfs, whose pages count as the container's memory.
"""

import posixpath
from collections.abc import Collection, Iterable
from typing import Any, Final

from mooring.agent.runtime import StartRefused
from mooring_client.schemas.states import Reason

MAX_VOLUMES: Final = 16
_MAX_PATH_LENGTH: Final = 255
# runc mounts these itself: a tmpfs there would break the container, or hide what confines it.
_KERNEL_PATHS: Final = ("/proc", "/sys", "/dev")
_MIB: Final = 2**20


def storage_options(
    disk_mib: int | None, *, enforced: bool, driver: str, image_bytes: int
) -> dict[str, dict[str, str]]:
    """Return `StorageOpt`, if there is a limit and the engine enforces it.

    btrfs limits the container's snapshot, which includes the image; overlay2 and zfs only what the container
    writes.
    """
    if disk_mib is None or not enforced:
        return {}
    image_mib = -(-image_bytes // _MIB) if driver == "btrfs" else 0
    return {"StorageOpt": {"size": f"{disk_mib + image_mib}M"}}


def file_size_limits(disk_mib: int | None, memory_mib: int, *, enforced: bool) -> list[dict[str, Any]]:
    """Return `Ulimits`: the limit of file sizes, if there is a disk limit and the engine enforces it.

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
    """Return `Tmpfs`: the mount options by path, one for each volume of the image.

    Args:
        taken: the paths of Mooring's own mounts, which replace the volumes there.

    Raises:
        StartRefused: `image_volumes_refused`: too many volumes, or one at a path that cannot be masked. Below
            a path of `taken`, runc would make the folder for the mask in the source of that mount.
    """
    paths = sorted({_normalized(image, volume) for volume in volumes} - set(taken))
    for path in paths:
        if _is_within(path, taken):
            raise _rejection(image, f"a volume at {path}, where Mooring mounts files of its own")
    if len(paths) > MAX_VOLUMES:
        raise _rejection(image, f"{len(paths)} volumes (the limit is {MAX_VOLUMES})")
    # `exec`: a volume allows it too. The container's memory limit applies to the sum of all.
    options = f"rw,nosuid,nodev,exec,mode=1777,size={max(1, memory_mib // 2)}m"
    return dict.fromkeys(paths, options)


def _is_within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _normalized(image: str, volume: str) -> str:
    """Return the path as the engine normalizes it. Raises StartRefused if the path cannot be masked."""
    if not volume.startswith("/") or len(volume) > _MAX_PATH_LENGTH or not volume.isprintable():
        raise _rejection(image, "a volume whose path is not absolute, too long, or not printable")
    path = "/" + posixpath.normpath(volume).lstrip("/")
    if path == "/" or ":" in path or _is_within(path, _KERNEL_PATHS):
        raise _rejection(image, f"a volume at {path}")
    return path


def _rejection(image: str, what: str) -> StartRefused:
    message = f"{image} declares {what}; change VOLUME in its Dockerfile"
    return StartRefused(Reason(code="image_volumes_refused", message=message))
