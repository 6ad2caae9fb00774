"""Converts the body of Docker's "create container" to a request for an instance. Pure, and an allow-list.

Every field is converted, has the value that clients send by default, or is refused with a reason.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from mooring_client.errors import BadRequest
from mooring_client.schemas.instances import InstanceCreate

Document = dict[str, Any]

LABEL_PREFIX: Final = "mooring."
_MIB: Final = 1024 * 1024
# Labels of ours: the field of the request, and how its text is read.
_LABELS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "mooring.priority": ("priority", int),
    "mooring.max_duration_s": ("max_duration_s", int),
    "mooring.on_capacity": ("on_capacity", str),
    "mooring.name": ("name", str),
    "mooring.project": ("project_id", str),
    "mooring.preemptible": ("preemptible", lambda text: {"true": True, "false": False}[text.lower()]),
}
_MODEL: Final = "mooring.model"

_CONFIG: Final = frozenset(
    {
        "Image", "Cmd", "Entrypoint", "Env", "WorkingDir", "User", "Labels", "ExposedPorts", "Tty",
        "OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr", "HostConfig",
        "NetworkingConfig",
        "StopTimeout", "StopSignal",
    }
)  # fmt: skip
_HOST: Final = frozenset(
    {
        "PortBindings", "PublishAllPorts", "ShmSize", "Memory", "NanoCpus", "CpuQuota", "CpuPeriod",
        "AutoRemove", "RestartPolicy", "Binds", "Mounts", "DeviceRequests", "NetworkMode", "LogConfig",
        "ConsoleSize",
        "StorageOpt", "Init",
    }
)  # fmt: skip
DEFAULT_NETWORKS: Final = frozenset({"default", "bridge"})
ONE_NETWORK: Final = (
    "each project has one network on each node, and others cannot be made: leave --network out, or write "
    "`network_mode: bridge` for each service of a compose file"
)
_VOLUME: Final = (
    "named volumes are not available yet: copy data with docker cp, or mount an object store in the program"
)
_REASONS: Final[Mapping[str, str]] = {
    "Privileged": "instances share nodes with other projects, so they have no privileges",
    "CapAdd": "instances share nodes with other projects; the security profile of the project decides",
    "Devices": "use --gpus; other devices of a node are not available",
    "DeviceCgroupRules": "use --gpus; other devices of a node are not available",
    "VolumesFrom": _VOLUME,
    "Volumes": _VOLUME,
    "PidMode": "instances have their own processes",
    "IpcMode": "instances have their own shared memory: use --shm-size",
    "UTSMode": "instances have their own host name",
    "UsernsMode": "the node's operator decides",
    "Runtime": "the node's operator decides",
    "SecurityOpt": "the security profile of the project decides",
    "Sysctls": "the node's operator decides",
    "Links": "instances of a project on one node reach each other by name",
    "Dns": "the node's operator decides",
    "ExtraHosts": "use a name that the DNS has",
    "Healthcheck": "use the events and the logs of the instance",
    "MacAddress": "the node's operator decides",
    "Tmpfs": "use /dev/shm and --shm-size",
    "CpuShares": "use --cpus",
    "CpusetCpus": "use --cpus",
    "MemorySwap": "instances have no swap",
    "MemoryReservation": "use --memory",
    "PidsLimit": "the node's operator decides",
    "Ulimits": "the node's operator decides",
    "ReadonlyRootfs": "the container's file system is writable, within its disk limit",
    "GroupAdd": "name the group with --user",
    "Hostname": "the host name is that of the instance: use --name",
    "Domainname": "the host name is that of the instance",
}
# Values other than the empty ones that mean "nothing special".
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "MemorySwappiness": (-1,),
    "IpcMode": ("private",),
    "CgroupnsMode": ("private", "host"),
    "PidsLimit": (-1,),
    "Isolation": ("default",),
    # Of every container here, or of every client.
    "SecurityOpt": (["no-new-privileges"], ["no-new-privileges:true"]),
    "CapDrop": (["ALL"],),
    "Runtime": ("nvidia",),
    "Platform": ("linux/amd64", "linux"),
}


@dataclass(frozen=True, slots=True)
class CreatedContainer:
    """What a client asked for.

    Attributes:
        request: the body of the request that creates the instance.
        config: what clients see of the container.
    """

    request: Document
    config: Document
    auto_remove: bool
    project_id: str | None
    warnings: list[str]


def refused(option: str, reason: str) -> BadRequest:
    return BadRequest(f"mooring: {option} is not supported: {reason}")


def converted(name: str, body: Document) -> CreatedContainer:
    """Convert the body of a create request.

    Args:
        name: of the container.

    Raises:
        BadRequest: it has an option that is not supported, or an invalid value.
    """
    host = _object(body, "HostConfig")
    _require_known(body, _CONFIG)
    _require_known(host, _HOST)
    _require_no_volumes(host)
    _require_network(host, _object(body, "NetworkingConfig"))
    warnings: list[str] = []
    labels = _strings(_object(body, "Labels"), "Labels")
    request: Document = {
        "image": body.get("Image") or "",
        "labels": {},
        "name": instance_name(name),
        "tty": bool(body.get("Tty")),
        "stdin": bool(body.get("OpenStdin")),
        "attach": bool(body.get("AttachStdout") or body.get("AttachStderr")),
        "env": _env(body.get("Env") or ()),
        "ports": _ports(_object(body, "ExposedPorts"), _object(host, "PortBindings"), host, warnings),
        "restart": _restart(_object(host, "RestartPolicy")),
        **_command(body),
        **_resources(host),
    }
    gpus = _gpus(host.get("DeviceRequests") or ())
    own = {key: value for key, value in labels.items() if key.startswith(LABEL_PREFIX)}
    request |= _of_labels(own, gpus)
    if gpus:
        request["gpus"] = gpus
    project_id = request.pop("project_id", None)
    _validate(request)
    if request["restart"] != "never" and host.get("AutoRemove"):
        raise BadRequest("can't create 'AutoRemove' container with restart policy")
    return CreatedContainer(request, body, bool(host.get("AutoRemove")), project_id, warnings)


def instance_name(name: str) -> str:
    """The name of the instance: a DNS label that resembles the container's name."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63].strip("-")
    return label or "container"


def _validate(request: Document) -> None:
    try:
        InstanceCreate.model_validate(request)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> BadRequest:
    """The first of the problems."""
    first = error.errors()[0]
    field = ".".join(str(each) for each in first["loc"])
    return BadRequest(f"mooring: {field}: {first['msg']}")


def _require_known(given: Document, known: frozenset[str]) -> None:
    for field, value in given.items():
        if field in known or _is_empty(value) or value in _HARMLESS.get(field, ()):
            continue
        raise refused(field, _REASONS.get(field, "instances have no such option"))


def _is_empty(value: object) -> bool:
    return value in (None, "", 0, False, [], {})


def _require_no_volumes(host: Document) -> None:
    for bind in host.get("Binds") or ():
        source = str(bind).partition(":")[0]
        if source.startswith(("/", ".", "~")):
            raise refused(
                f"-v {bind}", "a node's files are not available to instances; copy yours with docker cp"
            )
        raise refused(f"-v {bind}", _VOLUME)
    for mount in host.get("Mounts") or ():
        raise refused(f"--mount {mount.get('Target', '') if isinstance(mount, dict) else mount}", _VOLUME)


def _require_network(host: Document, networking: Document) -> None:
    mode = str(host.get("NetworkMode") or "default")
    endpoints = _object(networking, "EndpointsConfig")
    for network in [mode, *endpoints]:
        if network not in DEFAULT_NETWORKS:
            raise refused(f"--network {network}", ONE_NETWORK)
    for network, options in endpoints.items():
        wanted = {key for key, value in (options or {}).items() if not _is_empty(value)}
        if wanted == {"Aliases"}:
            raise refused("--network-alias", "instances have one name: use --name")
        if wanted:
            raise refused(f"{', '.join(sorted(wanted))} of the network {network}", ONE_NETWORK)


def _command(body: Document) -> Document:
    found: Document = {}
    for field, name in (("Cmd", "command"), ("Entrypoint", "entrypoint")):
        value = body.get(field)
        if value is None or (field == "Cmd" and value in ("", [])):
            continue
        # An empty entrypoint (`--entrypoint ""`) is sent as a list with one empty string.
        found[name] = (
            shlex.split(value) if isinstance(value, str) else [each for each in value if value != [""]]
        )
    for field, name in (("WorkingDir", "working_dir"), ("User", "user")):
        if body.get(field):
            found[name] = body[field]
    if body.get("StopSignal") not in (None, "", "SIGTERM", "TERM", "15"):
        raise refused(f"--stop-signal {body['StopSignal']}", "instances are stopped with SIGTERM")
    return found


def _env(entries: Any) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = str(entry).partition("=")
        if not equals:
            raise refused(f"--env {name}", "it removes a variable of the image; set it to an empty value")
        # `-e TOKEN=secret:NAME` takes the value from a secret of the project.
        variables[name] = {"secret": value[7:]} if value.startswith("secret:") else value
    return variables


def _resources(host: Document) -> Document:
    found: Document = {}
    if memory := _number(host, "Memory"):
        found["memory_mib"] = max(1, memory // _MIB)
    if cpus := _number(host, "NanoCpus"):
        found["cpus"] = cpus / 1e9
    elif quota := _number(host, "CpuQuota"):
        found["cpus"] = quota / (_number(host, "CpuPeriod") or 100_000)
    if shm := _number(host, "ShmSize"):
        found["shm_mib"] = max(1, shm // _MIB)
    storage = _object(host, "StorageOpt")
    if size := storage.get("size"):
        match = re.fullmatch(r"(\d+)([MGT])i?B?", str(size), re.IGNORECASE)
        if match is None:
            raise refused(f"--storage-opt size={size}", "give MiB, GiB or TiB, such as 20G")
        found["disk_mib"] = int(match[1]) * {"m": 1, "g": 1024, "t": 1024 * 1024}[match[2].lower()]
    if other := storage.keys() - {"size"}:
        raise refused(f"--storage-opt {', '.join(sorted(other))}", "only size")
    log = _object(host, "LogConfig")
    if log.get("Type") not in (None, "", "json-file") or not _is_empty(log.get("Config")):
        raise refused("--log-driver", "logs are kept on the node, and read with docker logs")
    return found


def _ports(exposed: Document, bindings: Document, host: Document, warnings: list[str]) -> list[Document]:
    """The ports to publish: with `-p`, and with `-P` those of `--expose`. The port proxy serves TCP ports."""
    wanted = {**bindings, **(exposed if host.get("PublishAllPorts") else {})}
    found = []
    for port, hosts in wanted.items():
        number, _, protocol = str(port).partition("/")
        if not number.isdigit():
            raise BadRequest(f"mooring: {port} is not a port")
        if protocol == "udp":
            found.append({"container": int(number), "protocol": protocol})
            continue
        chosen = [str(each.get("HostPort")) for each in hosts or () if isinstance(each, dict)]
        local = next((each for each in chosen if each not in {"None", "", "0"}), number)
        warnings.append(
            f"mooring: the port proxy serves port {number}: `endpoints` of the instance shows its URL; "
            f"for a port of this machine use ssh -L {local}:localhost:{number}"
        )
        found.append({"container": int(number), "protocol": "tcp", "expose": "proxy"})
    return found


def _restart(policy: Document) -> str:
    name = policy.get("Name") or "no"
    known = {"no": "never", "on-failure": "on_failure", "always": "always", "unless-stopped": "always"}
    if name not in known:
        raise refused(f"--restart {name}", "use no, on-failure or always")
    if policy.get("MaximumRetryCount"):
        raise refused("--restart on-failure:N", "the number of restarts cannot be limited")
    return known[name]


def _gpus(requests: Any) -> Document:
    found: Document = {}
    for each in requests:
        if not isinstance(each, dict):
            raise BadRequest("mooring: DeviceRequests is not valid")
        kinds = {kind for group in each.get("Capabilities") or () for kind in group}
        if each.get("Driver") not in (None, "", "nvidia") or not kinds <= {
            "gpu",
            "nvidia",
            "compute",
            "utility",
        }:
            raise refused("--gpus", "only a number of GPUs can be requested: --gpus 2")
        if each.get("DeviceIDs"):
            raise refused(
                "--gpus device=…",
                "the scheduler chooses the GPUs; name a model with --label mooring.model=H100",
            )
        count = each.get("Count", 0)
        if not isinstance(count, int) or count < 0:
            raise refused("--gpus all", "say how many GPUs the program needs, such as --gpus 2 or `count: 2`")
        if options := {key: value for key, value in (each.get("Options") or {}).items() if value}:
            raise refused(f"--gpus {', '.join(options)}", "only a number of GPUs can be requested")
        found = {"count": found.get("count", 0) + count}
    return found


def _of_labels(labels: Mapping[str, str], gpus: Document) -> Document:
    found: Document = {}
    for label, text in labels.items():
        if label == _MODEL:
            if not gpus:
                raise refused(f"--label {label}", "it needs --gpus")
            models = [each.strip() for each in text.split(",") if each.strip()]
            gpus["model"] = models[0] if len(models) == 1 else models
            continue
        if label not in _LABELS:
            known = ", ".join([_MODEL, *_LABELS])
            raise refused(f"--label {label}", f"labels that begin with mooring. are options: {known}")
        field, parse = _LABELS[label]
        try:
            found[field] = parse(text)
        except (ValueError, KeyError):
            raise BadRequest(f"mooring: --label {label}={text} is not valid") from None
    return found


def _object(given: Document, field: str) -> Document:
    value = given.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"mooring: {field} must be an object")
    return value


def _strings(given: Document, field: str) -> dict[str, str]:
    if not all(isinstance(value, str) for value in given.values()):
        raise BadRequest(f"mooring: {field} must have texts as values")
    return given


def _number(host: Document, field: str) -> int:
    value = host.get(field) or 0
    if not isinstance(value, int) or value < 0:
        raise BadRequest(f"mooring: {field} must be a number")
    return value
