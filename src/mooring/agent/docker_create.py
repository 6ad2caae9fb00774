"""From an assignment to the body of the engine's "create container": pure, and an allow-list (R6).

Whatever is not written here cannot be asked for: no binds, no devices, no privileges, no host namespaces.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooring.agent.runtime import secret_values
from mooring.core.instance import InstanceSpec, SecurityProfile
from mooring.schemas.agent import Assignment

LABEL = "mooring."
INSTANCE, ATTEMPT, GPUS = f"{LABEL}instance", f"{LABEL}attempt", f"{LABEL}gpus"
SPEC, CONTROL_PLANE, IMAGE = f"{LABEL}spec", f"{LABEL}control_plane", f"{LABEL}image"
PROJECT = f"{LABEL}project"
SECRET_ENV = f"{LABEL}secret_env"  # the names of the variables whose values are secrets

CDI_KIND = "nvidia.com/gpu"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICES = "void"

BRIDGE_PREFIX = "mr-"  # of the kernel's interfaces, by which the firewall knows them
RUNC = "runc"

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

# What an image may bake in to be given devices that nobody assigned. A name without `=` takes it away.
_DEVICE_ENV = {
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_NVSWITCH",
    "NVIDIA_GDRCOPY",
}
_DEVICE_ENV_PREFIX = "DOCKER_RESOURCE_"


@dataclass(frozen=True, slots=True)
class Limits:
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


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this engine can do."""

    cdi_devices: frozenset[str] = frozenset()  # qualified names, as `docker info` lists them
    has_init: bool = True
    simulated_gpus: bool = False


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
    assignment: Assignment, image: Image, abilities: Abilities, limits: Limits, control_plane_id: str
) -> dict[str, Any]:
    """The whole request, in the words of the Engine API."""
    spec = assignment.spec
    return {
        "Image": image.id,  # by id: a tag may have moved since its environment was read
        "Hostname": assignment.name,
        "Entrypoint": spec.entrypoint,
        "Cmd": spec.command,
        "WorkingDir": spec.working_dir or "",
        "User": spec.user or "",
        "Env": environment(assignment, image, abilities),
        "Labels": labels(assignment, image, control_plane_id),
        "ExposedPorts": {_port(port.container, port.protocol): {} for port in spec.ports},
        "Tty": False,
        "OpenStdin": False,
        "HostConfig": _host_config(assignment, abilities, limits),
        # Beside the name that Docker gives them, containers of one project know each other by the instance's.
        "NetworkingConfig": {
            "EndpointsConfig": {network_name(assignment.project_id): {"Aliases": [assignment.name]}}
        },
    }


def environment(assignment: Assignment, image: Image, abilities: Abilities) -> list[str]:
    """The user's variables, then ours; the engine adds the image's where neither names them."""
    baked = (entry.split("=", 1)[0] for entry in image.env)
    taken_away = [name for name in baked if name in _DEVICE_ENV or name.startswith(_DEVICE_ENV_PREFIX)]
    given = {name: value for name, value in assignment.spec.env.items() if isinstance(value, str)}
    ours = {
        VISIBLE_DEVICES: visible_devices(assignment.gpu_uuids, abilities),
        "MOORING_INSTANCE_ID": assignment.instance_id,
        "MOORING_INSTANCE_NAME": assignment.name,
    }
    if abilities.simulated_gpus and assignment.gpu_uuids:
        ours["MOORING_SIMULATED_GPUS"] = ",".join(assignment.gpu_uuids)
    variables = given | secret_values(assignment) | ours
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


def labels(assignment: Assignment, image: Image, control_plane_id: str) -> dict[str, str]:
    """The agent's memory: all that it must know about a container after a restart."""
    secret_env = ",".join(sorted(secret_values(assignment)))
    return {
        INSTANCE: assignment.instance_id,
        ATTEMPT: str(assignment.attempt),
        f"{LABEL}name": assignment.name,
        PROJECT: assignment.project_id,
        f"{LABEL}generation": str(assignment.generation),
        SPEC: spec_hash(assignment),
        GPUS: ",".join(assignment.gpu_uuids),
        IMAGE: image.digest or "",
        CONTROL_PLANE: control_plane_id,
        **({SECRET_ENV: secret_env} if secret_env else {}),
    }


def spec_hash(assignment: Assignment) -> str:
    """Tells two specs apart; defaults are left out, so that a release with new fields agrees."""
    asked = assignment.spec.model_dump(mode="json", exclude_defaults=True)
    given = [assignment.gpu_uuids, assignment.cpus, assignment.memory_mib]
    return hashlib.sha256(json.dumps([asked, given], sort_keys=True).encode()).hexdigest()


def command_line(spec: InstanceSpec, image: Image) -> list[str]:
    """What will run, for messages. Docker drops the image's command when an entrypoint is given."""
    if spec.entrypoint:
        return [*spec.entrypoint, *(spec.command or ())]
    entrypoint = image.entrypoint if spec.entrypoint is None else ()
    return [*entrypoint, *(spec.command or image.command)]


def _host_config(assignment: Assignment, abilities: Abilities, limits: Limits) -> dict[str, Any]:
    spec = assignment.spec
    memory = assignment.memory_mib * 2**20
    return {
        # R2: a default runtime `nvidia` would give every GPU to an image that bakes in `all`.
        "Runtime": limits.runtime,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES[assignment.security_profile]),
        "SecurityOpt": ["no-new-privileges:true"],
        "NetworkMode": network_name(assignment.project_id),
        "IpcMode": "private",
        "Memory": memory,
        "MemorySwap": memory,  # the same number: no swap at all
        "NanoCpus": round(assignment.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": (spec.shm_mib or max(1, assignment.memory_mib // 2)) * 2**20,
        "Ulimits": [{"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files}],
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": limits.log_max_size, "max-file": str(limits.log_max_files)},
        },
        "RestartPolicy": {"Name": "no"},  # restarts are the agent's: it must count and report them
        "Init": abilities.has_init,
        "PortBindings": {
            _port(port.container, port.protocol): [{"HostIp": "", "HostPort": ""}] for port in spec.ports
        },
        "DeviceRequests": device_requests(assignment.gpu_uuids, abilities),
    }


def _has_cdi_for(uuids: Sequence[str], abilities: Abilities) -> bool:
    return all(f"{CDI_KIND}={uuid}" in abilities.cdi_devices for uuid in uuids)


def _port(number: int, protocol: str) -> str:
    return f"{number}/{protocol}"
