"""Paths inside a container that are not allowed as working directory, or for volumes."""

import posixpath
from typing import Final

_KERNEL_FILE_SYSTEMS: Final = ("/proc", "/sys", "/dev")
# Mooring's own mounts: the toolbox, and usually the files of MPS (each node checks its own).
_OWN_MOUNTS: Final = ("/.mooring", "/tmp/nvidia-mps")  # noqa: S108 - not a path of this machine
# Docker mounts files of its own below /etc: it would write them into a volume at /etc.
_ENGINE_MOUNTS: Final = {
    "/": "it would replace the whole file system of the image",
    **dict.fromkeys(
        ("/etc", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"), "Docker mounts files of its own there"
    ),
}


def normal_path(path: str) -> str:
    """The absolute path as the container engine resolves it: no `.`, `..`, empty parts or final slash."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_kernel_path(path: str) -> bool:
    """Whether a normalized path is in a kernel file system.

    A program that starts in /proc may get a directory of the host as its own (CVE-2024-21626).
    """
    return any(is_within(path, root) for root in _KERNEL_FILE_SYSTEMS)


def is_within(path: str, folder: str) -> bool:
    """Whether a normalized path is the folder, or below it."""
    return path == folder or path.startswith(f"{folder}/")


def forbidden_mount_path(path: str) -> str | None:
    """Why no volume can be at this path; None: one can."""
    if path != normal_path(path):
        return f"write it as {normal_path(path)}"
    if not path.isprintable():
        return "it has a character that cannot be printed"
    if is_kernel_path(path):
        return "/proc, /sys and /dev belong to the kernel"
    if any(is_within(path, own) for own in _OWN_MOUNTS):
        return "Mooring mounts files of its own there"
    return _ENGINE_MOUNTS.get(path)
