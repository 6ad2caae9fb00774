"""Paths inside a container that are not allowed as working directory."""

import posixpath
from typing import Final

_KERNEL_FILE_SYSTEMS: Final = ("/proc", "/sys", "/dev")


def normal_path(path: str) -> str:
    """The absolute path as the container engine resolves it: no `.`, `..`, empty parts or final slash."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_kernel_path(path: str) -> bool:
    """Whether a normalized path is in a kernel file system.

    A program that starts in /proc may get a directory of the host as its own (CVE-2024-21626).
    """
    return any(path == root or path.startswith(f"{root}/") for root in _KERNEL_FILE_SYSTEMS)
