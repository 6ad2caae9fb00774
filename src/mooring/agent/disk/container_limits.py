"""What of a "create container" keeps it from filling the node's disk: pure.

The container's own layer is limited by the storage driver (`StorageOpt`). Anonymous volumes of images are
not: each is masked by a tmpfs, whose pages count as the container's memory.
"""

import posixpath
from collections.abc import Collection, Iterable
from typing import Any, Final

from mooring.agent.runtime import StartRefused
from mooring.core.instance.state import Reason

MOST_VOLUMES: Final = 16
_MOST_PATH: Final = 255
# What runc mounts or refuses itself: a volume there breaks the container, or hides what confines it.
_KERNELS: Final = ("/proc", "/sys", "/dev")
_MIB: Final = 2**20


def storage_options(
    disk_mib: int | None, *, enforced: bool, driver: str, image_bytes: int
) -> dict[str, dict[str, str]]:
    """`StorageOpt`, where the engine honours it and there is a limit.

    btrfs limits what the container's snapshot refers to, its image included; overlay2 and zfs only what the
    container writes.
    """
    if disk_mib is None or not enforced:
        return {}
    image_mib = -(-image_bytes // _MIB) if driver == "btrfs" else 0
    return {"StorageOpt": {"size": f"{disk_mib + image_mib}M"}}


def file_size_limits(disk_mib: int | None, memory_mib: int, *, enforced: bool) -> list[dict[str, Any]]:
    """The largest file, where disk is limited.

    /etc/hosts, /etc/hostname and /etc/resolv.conf can be written, and are files of the host outside of the
    container's layer: no storage driver limits them. Files in memory (/dev/shm) may be as large as it is.
    """
    if disk_mib is None or not enforced:
        return []
    most = max(disk_mib, memory_mib) * _MIB
    return [{"Name": "fsize", "Soft": most, "Hard": most}]


def volume_masks(
    image: str, volumes: Iterable[str], memory_mib: int, taken: Collection[str]
) -> dict[str, str]:
    """`Tmpfs`: by path, the options of what is mounted over each volume of the image.

    Args:
        taken: where something of ours is mounted already.

    Raises:
        StartRefused: `image_volumes_refused`: too many, or at a path that cannot be masked.
    """
    paths = sorted({_cleaned(image, volume) for volume in volumes} - set(taken))
    if len(paths) > MOST_VOLUMES:
        raise _refused(image, f"{len(paths)} volumes, and {MOST_VOLUMES} are the most")
    # `exec`, as on a volume. Each may hold half of the memory, and all together no more than the limit.
    options = f"rw,nosuid,nodev,exec,mode=1777,size={max(1, memory_mib // 2)}m"
    return dict.fromkeys(paths, options)


def _cleaned(image: str, volume: str) -> str:
    """The path as the engine would have it, if that can be masked."""
    if not volume.startswith("/") or len(volume) > _MOST_PATH or not volume.isprintable():
        raise _refused(image, "a volume whose path is not absolute, is too long, or cannot be printed")
    path = "/" + posixpath.normpath(volume).lstrip("/")
    if path == "/" or ":" in path or any(path == top or path.startswith(f"{top}/") for top in _KERNELS):
        raise _refused(image, f"a volume at {path}")
    return path


def _refused(image: str, what: str) -> StartRefused:
    message = f"{image} declares {what}; build it without (VOLUME in its Dockerfile)"
    return StartRefused(Reason(code="image_volumes_refused", message=message))
