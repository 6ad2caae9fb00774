"""Converts an assignment to the body of the engine's "create container". Pure, and an allow-list (R6).

Containers get nothing that is not listed here: no mounts but the toolbox, those of MPS for a share and the
project's volumes, no devices but assigned GPUs, no privileges, and no host namespace but the network's, for
groups of projects with permission.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooring.agent.decide.device_claims import Devices, Share, devices_of
from mooring.agent.disk.container_limits import file_size_limits, storage_options, volume_masks
from mooring.agent.docker.toolbox_mount import Toolbox, mount_of
from mooring.agent.docker.volume_mounts import mounts_of, require_apart
from mooring.agent.docker.working_dir import working_dir
from mooring.agent.gpus.mps import Daemon, Mps
from mooring.agent.runtime import StartRefused, secret_values
from mooring.schemas.agent import Assignment
from mooring_client.schemas.spec import InstanceSpec, SecurityProfile
from mooring_client.schemas.states import Reason

LABEL_PREFIX = "mooring."
INSTANCE_LABEL, ATTEMPT_LABEL = "mooring.instance", "mooring.attempt"
PROJECT_LABEL, GROUP_LABEL = "mooring.project", "mooring.group"
SPEC_LABEL, GPUS_LABEL, IMAGE_LABEL = "mooring.spec", "mooring.gpus", "mooring.image"
CONTROL_PLANE_LABEL = "mooring.control_plane"

CDI_KIND = "nvidia.com/gpu"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICES = "void"

BRIDGE_PREFIX = "mr-"  # of network interfaces; the firewall's rules match it
RUNC = "runc"

HOST_NETWORK = "host"
NETWORK_PREFIX = "mooring-"  # of the networks of projects and groups
# By a group's network: which interface NCCL and Gloo use between nodes, unless the user sets the variable. By
# default NCCL uses all interfaces, and Gloo the interface that the container's host name resolves to.
_INTERFACE_ENV: Mapping[str, Mapping[str, str]] = {
    # The overlay is a member's first interface; the second, which Docker adds, leads out of the node.
    "overlay": {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
    # `^`: all but those with one of these prefixes.
    "host": {"NCCL_SOCKET_IFNAME": f"^lo,docker,br-,veth,{BRIDGE_PREFIX}"},
}

# R7. `standard` is enough for apt, pip and sshd as root. Never NET_RAW, MKNOD or SYS_ADMIN.
CAPABILITIES: Mapping[SecurityProfile, tuple[str, ...]] = {
    "standard": (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "NET_BIND_SERVICE",
        "SYS_CHROOT",
    ),
    "strict": (),
}

STOP_SIGNAL = "SIGTERM"

# Variables of an image that would give a container devices that are not assigned to it. In a request, a name
# without `=` removes the variable.
DEVICE_ENV = {
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_NVSWITCH",
    "NVIDIA_GDRCOPY",
}
# Prefixes of variables that no image may set.
DEVICE_ENV_PREFIXES = ("DOCKER_RESOURCE_", "CUDA_MPS_", "MOORING_")


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """The limits and the runtime that all containers have."""

    pids: int = 4096
    open_files: int = 65_536
    log_max_size: str = "50m"
    log_max_files: int = 3
    runtime: str = RUNC  # R14: the operator may choose one that isolates better, such as runsc


@dataclass(frozen=True, slots=True)
class Image:
    """An image on the node. Containers run `id`; users see `digest`: None for one that was in no registry."""

    id: str
    digest: str | None
    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_dir: str = ""
    labels: tuple[str, ...] = ()  # their names
    volumes: tuple[str, ...] = ()
    size_bytes: int = 0  # unpacked


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine and its node support."""

    cdi_devices: frozenset[str] = frozenset()  # qualified names, as `docker info` lists them
    has_init: bool = True
    simulated_gpus: bool = False
    mps: Mps = field(default_factory=Mps)
    storage_driver: str = ""
    disk_limits: bool = False  # the engine enforces `StorageOpt`
    toolbox: Toolbox | None = None


def abilities_of(
    info: Mapping[str, Any], *, simulated_gpus: bool, mps: Mps | None = None, disk_limits: bool = False
) -> Abilities:
    """Return the abilities of an engine; `info` is its `docker info`."""
    devices = [device.get("ID", "") for device in info.get("DiscoveredDevices") or []]
    # "N/A": docker-init (Debian: package tini) is not installed, and a start with `Init` would fail.
    init_commit = (info.get("InitCommit") or {}).get("ID")
    return Abilities(
        cdi_devices=frozenset(device for device in devices if device.startswith(f"{CDI_KIND}=")),
        has_init=init_commit != "N/A",
        simulated_gpus=simulated_gpus,
        mps=mps or Mps(),
        storage_driver=str(info.get("Driver") or ""),
        disk_limits=disk_limits,
    )


def container_name(instance_id: str, attempt: int) -> str:
    """Return the name, which is unique to the attempt: a repeated create fails, and adds no container."""
    return f"mooring-{instance_id}-{attempt}"


def network_name(project_id: str) -> str:
    """Return the name of a project's network on each node."""
    return f"{NETWORK_PREFIX}{project_id}"


def bridge_name(project_id: str, control_plane_id: str) -> str:
    """Return the interface name of a project's network: 15 characters, the kernel's maximum."""
    return BRIDGE_PREFIX + hashlib.sha256(f"{control_plane_id}/{project_id}".encode()).hexdigest()[:12]


def container_config(
    assignment: Assignment, image: Image, abilities: Abilities, limits: ContainerLimits, control_plane_id: str
) -> dict[str, Any]:
    """Return the body of the request, in the notation of the Engine API."""
    spec = assignment.spec
    return {
        "Image": image.id,  # not by tag, which may name another image by now
        "Hostname": assignment.group.hostname if assignment.group else assignment.name,
        "Entrypoint": spec.entrypoint,
        "Cmd": spec.command,
        "WorkingDir": working_dir(spec, image.working_dir),
        "User": spec.user or "",
        "Env": environment(assignment, image, abilities),
        "Labels": labels(assignment, image, control_plane_id),
        "ExposedPorts": {_port(port.container, port.protocol): {} for port in spec.ports},
        "Tty": spec.tty,
        "OpenStdin": spec.stdin,
        "StdinOnce": spec.stdin,  # a client can close it; main_process.py keeps it open between clients
        # An image could set a health check that runs every millisecond, or a signal that stops nothing.
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": STOP_SIGNAL,
        "HostConfig": _host_config(assignment, abilities, limits)
        | _disk(assignment, image, abilities)
        | _all_mounts(assignment, abilities, control_plane_id),
        "NetworkingConfig": _networking(assignment),
    }


def network_of(assignment: Assignment) -> str:
    """Return the one network of the container.

    A member of a group with an overlay has no second network: Docker would attach the two in any order, which
    decides which interface is first, and to which address the container's host name resolves.

    Raises:
        StartRefused: the group has an overlay, but the control plane sent no name of it, or an invalid one.
    """
    group = assignment.group
    if group is None or group.network == "bridge":
        return network_name(assignment.project_id)
    if group.network == "host":
        return HOST_NETWORK
    # Any other name could be the engine's `host`, or a foreign network.
    if not (group.overlay_name or "").startswith(NETWORK_PREFIX):
        message = f"the control plane sent no valid name of the group's network: {group.overlay_name}"
        raise StartRefused(Reason(code="network_unavailable", message=message))
    return str(group.overlay_name)


def environment(assignment: Assignment, image: Image, abilities: Abilities) -> list[str]:
    """Return the variables to set, and the names of those to remove. The engine adds the image's others."""
    devices = devices_of(assignment)
    of_image = (entry.split("=", 1)[0] for entry in image.env)
    forbidden = [name for name in of_image if name in DEVICE_ENV or name.startswith(DEVICE_ENV_PREFIXES)]
    users = {name: value for name, value in assignment.spec.env.items() if isinstance(value, str)}
    ours = {
        VISIBLE_DEVICES: visible_devices(devices.gpu_uuids, abilities),
        "MOORING_INSTANCE_ID": assignment.instance_id,
        "MOORING_INSTANCE_NAME": assignment.name,
    }
    if abilities.simulated_gpus and devices.gpu_uuids:
        ours["MOORING_SIMULATED_GPUS"] = ",".join(devices.gpu_uuids)
    if devices.share and (daemon := _mps_daemon(devices, abilities)):
        ours |= daemon.environment(devices.share)
    variables = {**users, **secret_values(assignment)}
    if group := assignment.group:
        variables = {**_INTERFACE_ENV.get(group.network, {}), **variables, **group.env}
    variables |= ours
    removed = [name for name in forbidden if name not in variables]
    return [*(f"{name}={value}" for name, value in variables.items()), *removed]


def visible_devices(uuids: Sequence[str], abilities: Abilities) -> str:
    """Return NVIDIA_VISIBLE_DEVICES. Always set, as most CUDA images set `all` (R4). CDI needs `void`."""
    if not uuids or abilities.simulated_gpus or _has_cdi_for(uuids, abilities):
        return NO_DEVICES
    return ",".join(uuids)


def device_requests(uuids: Sequence[str], abilities: Abilities) -> list[dict[str, Any]]:
    """Request GPUs by UUID (R3): a count would select the first GPUs, and an index may change at a reboot."""
    if not uuids or abilities.simulated_gpus:
        return []
    if _has_cdi_for(uuids, abilities):
        return [{"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={uuid}" for uuid in uuids]}]
    return [{"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [["gpu", "compute", "utility"]]}]


def share_label(share: Share) -> str:
    return f"{share.isolation}/{share.milli}/{share.memory_mib}"


def _mps_daemon(devices: Devices, abilities: Abilities) -> Daemon | None:
    """Return the MPS daemon of the GPU; None if the container does not use MPS."""
    if devices.share is None or devices.share.isolation != "mps" or abilities.simulated_gpus:
        return None
    return abilities.mps.of(devices.gpu_uuids[0])


def labels(assignment: Assignment, image: Image, control_plane_id: str) -> dict[str, str]:
    """Return the labels, by which people and the agent find containers.

    Every label is set, possibly to "", so that no label of the image passes for one of Mooring's. The image's
    own labels are set to "", because other programs on the node may act on them.
    """
    devices = devices_of(assignment)
    group = assignment.group
    return {
        **dict.fromkeys(image.labels, ""),
        INSTANCE_LABEL: assignment.instance_id,
        ATTEMPT_LABEL: str(assignment.attempt),
        f"{LABEL_PREFIX}name": assignment.name,
        PROJECT_LABEL: assignment.project_id,
        f"{LABEL_PREFIX}generation": str(assignment.generation),
        SPEC_LABEL: spec_hash(assignment),
        GPUS_LABEL: ",".join(devices.gpu_uuids),
        IMAGE_LABEL: image.digest or "",
        CONTROL_PLANE_LABEL: control_plane_id,
        GROUP_LABEL: group.group_id if group else "",
        **_labels_of_earlier_releases(assignment),
    }


def _labels_of_earlier_releases(assignment: Assignment) -> dict[str, str]:
    """Return the labels that an earlier release needs after a downgrade. This release does not read them."""
    devices, group = devices_of(assignment), assignment.group
    on_host = group is not None and group.network == "host"
    ports = [_port(port.container, port.protocol) for port in assignment.spec.ports] if on_host else []
    return {
        f"{LABEL_PREFIX}cards": ",".join(devices.parent_gpus),
        f"{LABEL_PREFIX}share": share_label(devices.share) if devices.share else "",
        f"{LABEL_PREFIX}host_ports": ",".join(ports),
        f"{LABEL_PREFIX}secret_env": ",".join(sorted(secret_values(assignment))),
    }


def spec_hash(assignment: Assignment) -> str:
    """Return a hash of spec and resources, without defaults: a release with new fields computes the same."""
    spec = assignment.spec.model_dump(mode="json", exclude_defaults=True)
    devices = devices_of(assignment)
    resources: list[Any] = [list(devices.gpu_uuids), assignment.cpus, assignment.memory_mib]
    if devices.share:
        resources.append(share_label(devices.share))
    if assignment.disk_mib is not None:
        resources.append({"disk_mib": assignment.disk_mib})
    if assignment.group is not None:
        resources += [network_of(assignment), assignment.group.hostname]
    return hashlib.sha256(json.dumps([spec, resources], sort_keys=True).encode()).hexdigest()


def command_line(spec: InstanceSpec, image: Image) -> list[str]:
    """Return the command for error messages. Docker ignores the image's command if an entrypoint is given."""
    if spec.entrypoint:
        return [*spec.entrypoint, *(spec.command or ())]
    entrypoint = image.entrypoint if spec.entrypoint is None else ()
    return [*entrypoint, *(spec.command or image.command)]


def _host_config(assignment: Assignment, abilities: Abilities, limits: ContainerLimits) -> dict[str, Any]:
    spec, devices = assignment.spec, devices_of(assignment)
    memory = assignment.memory_mib * 2**20
    return {
        # R2: if Docker's default runtime is `nvidia`, an image that sets `all` would get every GPU.
        "Runtime": limits.runtime,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES[assignment.security_profile]),
        "SecurityOpt": ["no-new-privileges:true"],
        "NetworkMode": network_of(assignment),
        "IpcMode": "private",
        "Memory": memory,
        "MemorySwap": memory,  # equal to Memory: no swap
        "NanoCpus": round(assignment.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": (spec.shm_mib or max(1, assignment.memory_mib // 2)) * 2**20,
        "Ulimits": [
            {"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files},
            {"Name": "core", "Soft": 0, "Hard": 0},  # the host's core_pattern may be a program
            *file_size_limits(*_largest_files(assignment), enforced=abilities.disk_limits),
        ],
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": limits.log_max_size, "max-file": str(limits.log_max_files)},
        },
        "RestartPolicy": {"Name": "no"},  # the agent restarts containers, to count and report restarts
        "Init": abilities.has_init,
        "PortBindings": {
            _port(port.container, port.protocol): [{"HostIp": "", "HostPort": ""}]
            for port in spec.ports
            if port.expose == "node" and network_of(assignment) != HOST_NETWORK  # there, nothing is needed
        },
        "DeviceRequests": device_requests(devices.gpu_uuids, abilities),
    }


def _largest_files(assignment: Assignment) -> tuple[int | None, int]:
    """Return disk and memory for `file_size_limits`. A file of a volume may be as large as the volume."""
    in_volumes = max((volume.size_mib or 0 for volume in assignment.volumes), default=0)
    return assignment.disk_mib, max(assignment.memory_mib, in_volumes)


def _all_mounts(assignment: Assignment, abilities: Abilities, control_plane_id: str) -> dict[str, Any]:
    """Return Mooring's own mounts and the project's volumes. Raises StartRefused: they overlap."""
    own = _mounts(assignment, abilities)
    require_apart(assignment.volumes, [str(mount["Target"]) for mount in own])
    mounts = [*own, *mounts_of(assignment.volumes, control_plane_id)]
    return {"Mounts": mounts} if mounts else {}


def _mounts(assignment: Assignment, abilities: Abilities) -> list[dict[str, Any]]:
    """Return Mooring's own mounts, at constant paths: no request and no image can add or change one (R9)."""
    mps_daemon = _mps_daemon(devices_of(assignment), abilities)
    toolbox = [mount_of(abilities.toolbox)] if abilities.toolbox else []
    return [*(mps_daemon.mounts() if mps_daemon else ()), *toolbox]


def _disk(assignment: Assignment, image: Image, abilities: Abilities) -> dict[str, Any]:
    """Return the disk limits. File systems in memory replace the image's volumes, which have no limit."""
    own_mounts = [str(mount["Target"]) for mount in _mounts(assignment, abilities)]
    masks = volume_masks(assignment.spec.image, image.volumes, assignment.memory_mib, own_mounts)
    for volume in assignment.volumes:
        masks.pop(volume.path, None)  # it replaces the image's volume there
    return {
        **({"Tmpfs": masks} if masks else {}),
        **storage_options(
            assignment.disk_mib,
            enforced=abilities.disk_limits,
            driver=abilities.storage_driver,
            image_bytes=image.size_bytes,
        ),
    }


def _networking(assignment: Assignment) -> dict[str, Any]:
    """Return the container's network and its names there: the instance's, and its host name in a group."""
    if (network := network_of(assignment)) == HOST_NETWORK:
        return {}
    names = [assignment.name, *([assignment.group.hostname] if assignment.group else [])]
    return {"EndpointsConfig": {network: {"Aliases": list(dict.fromkeys(names))}}}


def _has_cdi_for(uuids: Sequence[str], abilities: Abilities) -> bool:
    return all(f"{CDI_KIND}={uuid}" in abilities.cdi_devices for uuid in uuids)


def _port(number: int, protocol: str) -> str:
    return f"{number}/{protocol}"
