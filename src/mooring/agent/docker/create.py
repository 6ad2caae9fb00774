"""From an assignment to the body of the engine's "create container": pure, and an allow-list (R6).

Whatever is not written here cannot be asked for: no binds but the two of MPS for a share, no devices, no
privileges, no host namespaces but the network's, which the control plane gives to groups of projects that an
admin allowed it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooring.agent.decide.device_claims import Devices, Share, devices_of
from mooring.agent.disk.container_limits import file_size_limits, storage_options, volume_masks
from mooring.agent.gpus.mps import Daemon, Mps
from mooring.agent.runtime import StartRefused, secret_values
from mooring.core.instance.spec import InstanceSpec, SecurityProfile
from mooring.core.instance.state import Reason
from mooring.core.paths import is_kernel_path, normal_path
from mooring.schemas.agent import Assignment

LABEL = "mooring."
INSTANCE, ATTEMPT, GPUS = f"{LABEL}instance", f"{LABEL}attempt", f"{LABEL}gpus"
SPEC, CONTROL_PLANE, IMAGE = f"{LABEL}spec", f"{LABEL}control_plane", f"{LABEL}image"
PROJECT = f"{LABEL}project"
GROUP = f"{LABEL}group"

CDI_KIND = "nvidia.com/gpu"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICES = "void"

BRIDGE_PREFIX = "mr-"  # of the kernel's interfaces, by which the firewall knows them
RUNC = "runc"

HOST_NETWORK = "host"
OVERLAY_PREFIX = "mooring-"
# Which interfaces the libraries that train over several nodes talk through, unless the user says so. Left to
# themselves, NCCL takes all that it finds, and Gloo the one of the container's own name.
_INTERFACES: Mapping[str, Mapping[str, str]] = {
    # A member's only network is its first interface; the way out of the node, which Docker adds, is another.
    "overlay": {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
    "host": {"NCCL_SOCKET_IFNAME": f"^lo,docker,br-,veth,{BRIDGE_PREFIX}"},
}

# R7. The standard ones are enough for apt, pip and sshd as root; never NET_RAW, MKNOD or SYS_ADMIN.
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

# What an image may bake in to be given devices that nobody assigned. A name without `=` takes it away.
DEVICE_ENV = {
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_NVSWITCH",
    "NVIDIA_GDRCOPY",
}
# And what it would fake: ours.
DEVICE_ENV_PREFIXES = ("DOCKER_RESOURCE_", "CUDA_MPS_", "MOORING_")


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What every instance gets besides the CPUs and memory it was assigned."""

    pids: int = 4096
    open_files: int = 65_536
    log_max_size: str = "50m"
    log_max_files: int = 3
    runtime: str = RUNC  # R14: or a stronger one that the operator chose, such as runsc


@dataclass(frozen=True, slots=True)
class Image:
    """A local image: `id` is what runs, `digest` what is shown, null if it never was in a registry."""

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
    """What this engine can do."""

    cdi_devices: frozenset[str] = frozenset()  # qualified names, as `docker info` lists them
    has_init: bool = True
    simulated_gpus: bool = False
    mps: Mps = field(default_factory=Mps)
    storage_driver: str = ""
    disk_limits: bool = False  # the engine holds a container to its `StorageOpt`


def abilities_of(
    info: Mapping[str, Any], *, simulated_gpus: bool, mps: Mps | None = None, disk_limits: bool = False
) -> Abilities:
    """What `docker info` says the engine can do."""
    devices = [device.get("ID", "") for device in info.get("DiscoveredDevices") or []]
    # Its version could not be read: docker-init (Debian: package tini) is not there, and a start with it
    # would fail.
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
    """The same for every try of one attempt: a create that timed out is found again, never repeated."""
    return f"mooring-{instance_id}-{attempt}"


def network_name(project_id: str) -> str:
    """One network per project and node; a project belongs to one control plane."""
    return f"mooring-{project_id}"


def bridge_name(project_id: str, control_plane_id: str) -> str:
    """Of the network's interface: 15 characters, as many as the kernel takes."""
    return BRIDGE_PREFIX + hashlib.sha256(f"{control_plane_id}/{project_id}".encode()).hexdigest()[:12]


def container_config(
    assignment: Assignment, image: Image, abilities: Abilities, limits: ContainerLimits, control_plane_id: str
) -> dict[str, Any]:
    """The whole request, in the words of the Engine API."""
    spec = assignment.spec
    return {
        "Image": image.id,  # by id: a tag may have moved since its environment was read
        "Hostname": assignment.group.hostname if assignment.group else assignment.name,
        "Entrypoint": spec.entrypoint,
        "Cmd": spec.command,
        "WorkingDir": working_dir(spec, image),
        "User": spec.user or "",
        "Env": environment(assignment, image, abilities),
        "Labels": labels(assignment, image, control_plane_id),
        "ExposedPorts": {_port(port.container, port.protocol): {} for port in spec.ports},
        "Tty": False,
        "OpenStdin": False,
        # Both would come from the image: a health check as often as every millisecond, a stop signal of none.
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": STOP_SIGNAL,
        "HostConfig": _host_config(assignment, abilities, limits) | _disk(assignment, image, abilities),
        "NetworkingConfig": _networking(assignment),
    }


def attached_to(assignment: Assignment) -> str:
    """The one network that its container is on.

    A member is on its group's overlay alone. Docker joins two networks in any order, and with it changes
    which interface is the first, and which address is that of the container's own name.

    Raises:
        StartRefused: the control plane did not name it, or not as ours are named.
    """
    group = assignment.group
    if group is None or group.network == "bridge":
        return network_name(assignment.project_id)
    if group.network == "host":
        return HOST_NETWORK
    # Another name could be the engine's `host`, or a foreign network.
    if not (group.overlay_name or "").startswith(OVERLAY_PREFIX):
        message = f"the control plane named no network of its group: {group.overlay_name}"
        raise StartRefused(Reason(code="network_unavailable", message=message))
    return str(group.overlay_name)


def environment(assignment: Assignment, image: Image, abilities: Abilities) -> list[str]:
    """The user's variables, then ours; the engine adds the image's where neither names them."""
    devices = devices_of(assignment)
    baked = (entry.split("=", 1)[0] for entry in image.env)
    bad = [name for name in baked if name in DEVICE_ENV or name.startswith(DEVICE_ENV_PREFIXES)]
    given = {name: value for name, value in assignment.spec.env.items() if isinstance(value, str)}
    ours = {
        VISIBLE_DEVICES: visible_devices(devices.gpu_uuids, abilities),
        "MOORING_INSTANCE_ID": assignment.instance_id,
        "MOORING_INSTANCE_NAME": assignment.name,
    }
    if abilities.simulated_gpus and devices.gpu_uuids:
        ours["MOORING_SIMULATED_GPUS"] = ",".join(devices.gpu_uuids)
    if devices.share and (daemon := _mps_daemon(devices, abilities)):
        ours |= daemon.environment(devices.share)
    group = assignment.group
    defaults, rendezvous = (_INTERFACES.get(group.network, {}), group.env) if group else ({}, {})
    variables = {**defaults, **given, **secret_values(assignment), **rendezvous, **ours}
    taken_away = [name for name in bad if name not in variables]
    return [*(f"{name}={value}" for name, value in variables.items()), *taken_away]


def visible_devices(uuids: Sequence[str], abilities: Abilities) -> str:
    """Always set, because most CUDA images bake in `all` (R4). CDI needs it to be `void`."""
    if not uuids or abilities.simulated_gpus or _has_cdi_for(uuids, abilities):
        return NO_DEVICES
    return ",".join(uuids)


def device_requests(uuids: Sequence[str], abilities: Abilities) -> list[dict[str, Any]]:
    """GPUs by UUID only (R3): a count always means the first ones, and an index changes at a reboot."""
    if not uuids or abilities.simulated_gpus:
        return []
    if _has_cdi_for(uuids, abilities):
        return [{"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={uuid}" for uuid in uuids]}]
    return [{"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [["gpu", "compute", "utility"]]}]


def share_label(share: Share) -> str:
    return f"{share.isolation}/{share.milli}/{share.memory_mib}"


def _mps_daemon(devices: Devices, abilities: Abilities) -> Daemon | None:
    """None: the container has nothing to do with MPS."""
    if devices.share is None or devices.share.isolation != "mps" or abilities.simulated_gpus:
        return None
    return abilities.mps.of(devices.gpu_uuids[0])


def labels(assignment: Assignment, image: Image, control_plane_id: str) -> dict[str, str]:
    """For people, and for telling our containers from others; what was given is in the agent's records.

    Every label is set, empty where there is nothing to say, so that none of an image's is taken for ours; and
    the image's own are emptied, for other programs on the node that obey labels.
    """
    devices = devices_of(assignment)
    group = assignment.group
    return {
        **dict.fromkeys(image.labels, ""),
        INSTANCE: assignment.instance_id,
        ATTEMPT: str(assignment.attempt),
        f"{LABEL}name": assignment.name,
        PROJECT: assignment.project_id,
        f"{LABEL}generation": str(assignment.generation),
        SPEC: spec_hash(assignment),
        GPUS: ",".join(devices.gpu_uuids),
        IMAGE: image.digest or "",
        CONTROL_PLANE: control_plane_id,
        GROUP: group.group_id if group else "",
        **_labels_of_earlier_releases(assignment),
    }


def _labels_of_earlier_releases(assignment: Assignment) -> dict[str, str]:
    """These were their memory, and are for a node that goes back to one; nothing here reads them."""
    devices, group = devices_of(assignment), assignment.group
    on_host = group is not None and group.network == "host"
    ports = [_port(port.container, port.protocol) for port in assignment.spec.ports] if on_host else []
    return {
        f"{LABEL}cards": ",".join(devices.parent_gpus),
        f"{LABEL}share": share_label(devices.share) if devices.share else "",
        f"{LABEL}host_ports": ",".join(ports),
        f"{LABEL}secret_env": ",".join(sorted(secret_values(assignment))),
    }


def working_dir(spec: InstanceSpec, image: Image) -> str:
    """Where its program starts; "": the engine's default.

    Raises:
        StartRefused: in a file system of the kernel.
    """
    asked = spec.working_dir or image.working_dir
    if not asked:
        return ""
    path = normal_path(asked)
    if is_kernel_path(path):
        whose = "its" if spec.working_dir else "its image's"
        message = f"{whose} working directory is {path[:100]}, and must not be in /proc, /sys or /dev"
        raise StartRefused(Reason(code="working_dir_unusable", message=message))
    return path


def spec_hash(assignment: Assignment) -> str:
    """Tells two specs apart; defaults are left out, so that a release with new fields agrees."""
    asked = assignment.spec.model_dump(mode="json", exclude_defaults=True)
    devices = devices_of(assignment)
    given: list[Any] = [list(devices.gpu_uuids), assignment.cpus, assignment.memory_mib]
    if devices.share:
        given.append(share_label(devices.share))
    if assignment.disk_mib is not None:
        given.append({"disk_mib": assignment.disk_mib})
    if assignment.group is not None:
        given += [attached_to(assignment), assignment.group.hostname]
    return hashlib.sha256(json.dumps([asked, given], sort_keys=True).encode()).hexdigest()


def command_line(spec: InstanceSpec, image: Image) -> list[str]:
    """What will run, for messages. Docker drops the image's command when an entrypoint is given."""
    if spec.entrypoint:
        return [*spec.entrypoint, *(spec.command or ())]
    entrypoint = image.entrypoint if spec.entrypoint is None else ()
    return [*entrypoint, *(spec.command or image.command)]


def _host_config(assignment: Assignment, abilities: Abilities, limits: ContainerLimits) -> dict[str, Any]:
    spec, devices = assignment.spec, devices_of(assignment)
    memory, daemon = assignment.memory_mib * 2**20, _mps_daemon(devices, abilities)
    return {
        # R2: a default runtime `nvidia` would give every GPU to an image that bakes in `all`.
        "Runtime": limits.runtime,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES[assignment.security_profile]),
        "SecurityOpt": ["no-new-privileges:true"],
        "NetworkMode": attached_to(assignment),
        "IpcMode": "private",
        "Memory": memory,
        "MemorySwap": memory,  # the same number: no swap at all
        "NanoCpus": round(assignment.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": (spec.shm_mib or max(1, assignment.memory_mib // 2)) * 2**20,
        "Ulimits": [
            {"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files},
            {"Name": "core", "Soft": 0, "Hard": 0},  # the host's core_pattern may be a program
            *file_size_limits(assignment.disk_mib, assignment.memory_mib, enforced=abilities.disk_limits),
        ],
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": limits.log_max_size, "max-file": str(limits.log_max_files)},
        },
        "RestartPolicy": {"Name": "no"},  # restarts are the agent's: it must count and report them
        "Init": abilities.has_init,
        "PortBindings": {
            _port(port.container, port.protocol): [{"HostIp": "", "HostPort": ""}]
            for port in spec.ports
            if attached_to(assignment) != HOST_NETWORK  # where each is a port of the node as it is
        },
        "DeviceRequests": device_requests(devices.gpu_uuids, abilities),
        **({"Mounts": daemon.mounts()} if daemon else {}),
    }


def _disk(assignment: Assignment, image: Image, abilities: Abilities) -> dict[str, Any]:
    """What keeps it from filling the node's disk; images' volumes would be outside of every limit."""
    daemon = _mps_daemon(devices_of(assignment), abilities)
    ours = [str(mount["Target"]) for mount in daemon.mounts()] if daemon else []
    masks = volume_masks(assignment.spec.image, image.volumes, assignment.memory_mib, ours)
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
    """Beside the name that Docker gives them, containers know each other by instance and by member."""
    network = attached_to(assignment)
    if network == HOST_NETWORK:
        return {}
    names = [assignment.name, *([assignment.group.hostname] if assignment.group else [])]
    return {"EndpointsConfig": {network: {"Aliases": list(dict.fromkeys(names))}}}


def _has_cdi_for(uuids: Sequence[str], abilities: Abilities) -> bool:
    return all(f"{CDI_KIND}={uuid}" in abilities.cdi_devices for uuid in uuids)


def _port(number: int, protocol: str) -> str:
    return f"{number}/{protocol}"
