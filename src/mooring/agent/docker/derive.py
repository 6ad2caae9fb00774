"""Derives the record of a container that has none. Pure.

Such a container was created by a release without records, or before the file was lost, or by a create whose
answer did not arrive. Nothing is read that an image can set:

- only the creator sets the name and the restrictions in HostConfig, and they must be as the agent sets them;
- of the labels, only those are read that every release has set on every container, replacing the image's;
- GPUs are read from `DeviceRequests`, and the driver reports the GPU of a MIG device.

The rest (shares, groups, ports on the host's network, names of secret variables) is missing until the control
plane sends the assignment with the same spec hash (`Observer.expect`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from mooring.agent.docker.container_records import ContainerRecord
from mooring.agent.docker.create import (
    ATTEMPT_LABEL,
    CONTROL_PLANE_LABEL,
    GPUS_LABEL,
    HOST_NETWORK,
    IMAGE_LABEL,
    INSTANCE_LABEL,
    NETWORK_PREFIX,
    PROJECT_LABEL,
    SPEC_LABEL,
    container_name,
)
from mooring.agent.docker.verify import requested_devices

ParentOf = Callable[[str], str | None]  # UUID of a MIG device -> UUID of its GPU, if known

_ATTEMPT: Final = re.compile(r"[0-9]{1,9}", re.ASCII)


def is_ours(labels: Mapping[str, str], control_plane_id: str | None) -> bool:
    """Return whether labels name an instance of this control plane. No proof: any program may set labels."""
    return (
        control_plane_id is not None
        and labels.get(CONTROL_PLANE_LABEL) == control_plane_id
        and bool(labels.get(INSTANCE_LABEL))
        and _ATTEMPT.fullmatch(labels.get(ATTEMPT_LABEL, "")) is not None
    )


def has_our_name(labels: Mapping[str, str], name: str) -> bool:
    """Return whether a container has the name of the attempt in its labels. No image can set the name."""
    return name.lstrip("/") == container_name(labels[INSTANCE_LABEL], int(labels[ATTEMPT_LABEL]))


def derive_record(
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
    gpu_uuids = tuple(filter(None, labels.get(GPUS_LABEL, "").split(","))) if simulated_gpus else requested
    parents = tuple(filter(None, map(parent_of, gpu_uuids)))
    return ContainerRecord(
        control_plane_id=control_plane_id,
        instance_id=labels[INSTANCE_LABEL],
        attempt=int(labels[ATTEMPT_LABEL]),
        project_id=labels.get(PROJECT_LABEL, ""),
        spec=labels.get(SPEC_LABEL, ""),
        image_digest=labels.get(IMAGE_LABEL) or None,
        gpu_uuids=gpu_uuids,
        cards=parents if len(parents) == len(gpu_uuids) else (),
        secret_env=None,
    )


def _is_confined(host: Mapping[str, Any]) -> bool:
    """Return whether the container is restricted as every release restricts containers."""
    network = host.get("NetworkMode") or ""
    return (
        not host.get("Privileged")
        and host.get("CapDrop") == ["ALL"]
        and any(option.startswith("no-new-privileges") for option in host.get("SecurityOpt") or ())
        and (network == HOST_NETWORK or network.startswith(NETWORK_PREFIX))
    )
