"""Volumes as Docker volumes: their names, labels, options and mounts. Pure, and an allow-list (R9).

No request names a path of the node. A volume of the drivers `local` and `cache` is a folder that Docker
chooses; of `nfs`, the server and folder that an admin has entered, mounted with `nosuid,nodev`. Folders of
Docker cannot have these flags; there, `no-new-privileges` and the device cgroup of each container have the
same effect.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from mooring.agent.runtime import StartRefused
from mooring.schemas.agent import AssignedVolume
from mooring_client.schemas.paths import is_within
from mooring_client.schemas.states import Reason

VOLUME_LABEL: Final = "mooring.volume"  # the id
DRIVER_LABEL: Final = "mooring.volume.driver"
_PROJECT_LABEL, _CONTROL_PLANE_LABEL = "mooring.project", "mooring.control_plane"
# A server that does not answer: a request is repeated after 15 s, and fails after the third time.
_SOFT: Final = "soft,timeo=150,retrans=3"


def volume_name(volume_id: str) -> str:
    """The name of the volume on each node."""
    return f"mooring-{volume_id}"


def volume_labels(volume: AssignedVolume, control_plane_id: str) -> dict[str, str]:
    """The labels by which the agent knows its volumes again. Volumes cannot be labelled later."""
    return {
        VOLUME_LABEL: volume.volume_id,
        DRIVER_LABEL: volume.driver,
        _PROJECT_LABEL: volume.project_id,
        _CONTROL_PLANE_LABEL: control_plane_id,
    }


def volume_config(volume: AssignedVolume, control_plane_id: str, *, sized: bool) -> dict[str, Any]:
    """The body of the request that creates the volume.

    Args:
        sized: whether the engine enforces its size.
    """
    return {
        "Name": volume_name(volume.volume_id),
        "Driver": "local",
        "DriverOpts": _options(volume, sized=sized),
        "Labels": volume_labels(volume, control_plane_id),
    }


def _options(volume: AssignedVolume, *, sized: bool) -> dict[str, str]:
    if volume.driver == "nfs":
        server = f"[{volume.server}]" if ":" in (volume.server or "") else volume.server
        waiting = "hard" if volume.hard else _SOFT
        mount = f"addr={server},nfsvers={volume.version or 4},nosuid,nodev,{waiting}"
        return {"type": "nfs", "o": mount, "device": f":{volume.exported_path}"}
    return {"size": f"{volume.size_mib}m"} if sized and volume.size_mib else {}


def mounts_of(volumes: Sequence[AssignedVolume], control_plane_id: str) -> list[dict[str, Any]]:
    """The mounts for the Engine API. `NoCopy`: no file of an image gets into a volume, beyond its limits."""
    return [
        {
            "Type": "volume",
            "Source": volume_name(volume.volume_id),
            "Target": volume.path,
            "ReadOnly": volume.read_only,
            "VolumeOptions": {
                "NoCopy": True,
                # Docker creates a volume that was just removed; by its labels it is still known as Mooring's.
                "Labels": volume_labels(volume, control_plane_id),
                "DriverConfig": {"Name": "local", "Options": _options(volume, sized=False)},
            },
        }
        for volume in volumes
    ]


def require_apart(volumes: Sequence[AssignedVolume], own_paths: Iterable[str]) -> None:
    """Raises StartRefused: a volume would be at, above or below a mount of Mooring's own."""
    for own in own_paths:
        for volume in volumes:
            if is_within(volume.path, own) or is_within(own, volume.path):
                message = f"the node mounts files of its own at {own}; mount the volume elsewhere"
                raise StartRefused(Reason(code="volume_path_unusable", message=message))
