"""The mount of the toolbox: programs for SSH clients that many images lack. Pure.

The operator builds it with `mooring toolbox` (agent/toolbox/build.py), as a Docker volume. A container gets
the one that is current when it is created (agent/docker/toolbox_volumes.py), and keeps it.

A container does not get that volume itself, but an overlay of its own over it. On a file that containers
share, one of them can take a lease (`F_SETLEASE`), even through a read-only mount: it would delay each open
of the file in the others by 45 s. It could also watch when they open it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TOOLBOX: Final = "/.mooring"  # where containers have it; no request can change that
SHELL: Final = f"{TOOLBOX}/bin/sh"

LABEL: Final = "mooring.toolbox"
FILES, COMPLETE, MOUNT = "files", "complete", "mount"  # values of the label
FILES_LABEL: Final = "mooring.toolbox.files"  # of an overlay: the name of the volume below it

# Folders of the volume. An overlay without a writable layer needs two, so the second is empty.
FILES_FOLDER, EMPTY_FOLDER = "files", "empty"


@dataclass(frozen=True, slots=True, order=True)
class Toolbox:
    """A volume with the files; `path` is its folder, as the engine sees it."""

    volume: str
    path: str


def mount_of(toolbox: Toolbox) -> dict[str, Any]:
    """Return the mount for the Engine API: an anonymous volume, which is removed with its container.

    An overlay without a writable layer is read-only whatever the mount says; and `ReadOnly` is invalid for an
    anonymous volume. `NoCopy`: no file of an image gets into it.
    """
    layers = f"{toolbox.path}/{FILES_FOLDER}:{toolbox.path}/{EMPTY_FOLDER}"
    overlay = {"type": "overlay", "device": "overlay", "o": f"ro,lowerdir={layers}"}
    return {
        "Type": "volume",
        "Target": TOOLBOX,
        "VolumeOptions": {
            "NoCopy": True,
            "Labels": {LABEL: MOUNT, FILES_LABEL: toolbox.volume},
            "DriverConfig": {"Name": "local", "Options": overlay},
        },
    }


def toolbox_of(host_config: Mapping[str, Any]) -> str | None:
    """Return the toolbox's volume in a container's HostConfig, which no image can set; None without one."""
    for mount in host_config.get("Mounts") or ():
        if mount.get("Target") == TOOLBOX:
            return str(mount["VolumeOptions"]["Labels"][FILES_LABEL])
    return None
