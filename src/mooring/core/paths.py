"""Paths inside a container that nobody may start in."""

import posixpath
from typing import Final

_KERNEL_FILE_SYSTEMS: Final = ("/proc", "/sys", "/dev")


def normal_path(path: str) -> str:
    """Absolute, as the container engine reads it: without `.`, `..`, empty parts and a final slash."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_kernel_path(path: str) -> bool:
    """Whether a normal path is in a file system of the kernel.

    In /proc a program may start with a directory of the host as its own (CVE-2024-21626).
    """
    return any(path == root or path.startswith(f"{root}/") for root in _KERNEL_FILE_SYSTEMS)
