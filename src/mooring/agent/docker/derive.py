"""Derives the record of a container that has none. Pure.

Such a container was created by a release without records, or before the file was lost, or by a create whose
answer did not arrive. Nothing is read from what an image can set:

- the name and the HostConfig are set by the creator only, and must be as the agent sets them;
- of the labels, only those that every release has set on every container, which replace those of the image;
- GPUs are those in `DeviceRequests`; the driver reports the parent GPU of a MIG device.

The rest (shares, ports on the host's network, names of secret variables) is missing until the control plane
sends the assignment with the same spec hash (`Observer.expect`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from mooring.agent.docker.container_records import ContainerRecord
from mooring.agent.docker.create import (
    ATTEMPT,
    CONTROL_PLANE,
    GPUS,
    HOST_NETWORK,
    IMAGE,
    INSTANCE,
    OVERLAY_PREFIX,
    PROJECT,
    SPEC,
    container_name,
)
from mooring.agent.docker.verify import requested_devices

ParentOf = Callable[[str], str | None]

_ATTEMPT: Final = re.compile(r"[0-9]{1,9}", re.ASCII)


def is_ours(labels: Mapping[str, str], control_plane_id: str | None) -> bool:
    """Return whether the labels name an instance of this control plane. Any program may set labels."""
    return (
        control_plane_id is not None
        and labels.get(CONTROL_PLANE) == control_plane_id
        and bool(labels.get(INSTANCE))
        and _ATTEMPT.fullmatch(labels.get(ATTEMPT, "")) is not None
    )


def has_our_name(labels: Mapping[str, str], name: str) -> bool:
    """Return whether a container is named after the instance in its labels. No image can set the name."""
    return name.lstrip("/") == container_name(labels[INSTANCE], int(labels[ATTEMPT]))


def derived(
    inspected: Mapping[str, Any], control_plane_id: str | None, parent_of: ParentOf, *, simulated_gpus: bool
) -> ContainerRecord | None:
    """Return the record of a container; None if no agent of this control plane created it."""
    labels, host = inspected["Config"]["Labels"] or {}, inspected["HostConfig"]
    if control_plane_id is None or not is_ours(labels, control_plane_id):
        return None
    if not has_our_name(labels, inspected["Name"]) or not _is_confined(host):
        return None
    requested, counted = requested_devices(host)
    if counted:
        return None
    # Simulated GPUs are not in DeviceRequests. Every release has set this label on every container.
    gpu_uuids = tuple(filter(None, labels.get(GPUS, "").split(","))) if simulated_gpus else requested
    parents = [parent_of(uuid) for uuid in gpu_uuids]
    return ContainerRecord(
        control_plane_id=control_plane_id,
        instance_id=labels[INSTANCE],
        attempt=int(labels[ATTEMPT]),
        project_id=labels.get(PROJECT, ""),
        spec=labels.get(SPEC, ""),
        image_digest=labels.get(IMAGE) or None,
        gpu_uuids=gpu_uuids,
        cards=tuple(filter(None, parents)) if any(parents) and all(parents) else (),
        secret_env=None,
    )


def _is_confined(host: Mapping[str, Any]) -> bool:
    """Return whether the container is restricted as every release restricts containers."""
    network = host.get("NetworkMode") or ""
    return (
        not host.get("Privileged")
        and host.get("CapDrop") == ["ALL"]
        and any(option.startswith("no-new-privileges") for option in host.get("SecurityOpt") or ())
        and (network == HOST_NETWORK or network.startswith(OVERLAY_PREFIX))
    )
