"""What Docker clients see of an instance."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.instance.state import ENDED
from mooring.db.tables import Instance
from mooring_client.schemas.states import DesiredState, State

Document = dict[str, Any]

_NEVER: Final = "0001-01-01T00:00:00Z"
_UP: Final = frozenset({State.RUNNING, State.STOPPING, State.UNREACHABLE})
_FAILED_START: Final = 125  # as `docker run` reports it
_EXIT_CODES: Final[Mapping[str, int]] = {"command_not_found": 127, "command_not_executable": 126}
_HAS_EXIT_CODE: Final = frozenset({"exited", "restarting"})
_RESTARTS: Final = {"never": "no", "on_failure": "on-failure", "always": "always"}


def is_up(instance: Instance | None) -> bool:
    return instance is not None and instance.state in _UP


def has_ended(instance: Instance | None) -> bool:
    return instance is not None and instance.state in ENDED


def is_restarting(instance: Instance | None) -> bool:
    """Whether its program has ended, and its restart policy starts it again soon."""
    code = (instance.reason or {}).get("code") if instance is not None else None
    return instance is not None and instance.state is State.STARTING and code == "restarting"


def status_of(found: FoundContainer) -> str:
    """One of Docker's states."""
    if is_up(found.instance):
        return "running"
    if is_restarting(found.instance):
        return "restarting"
    return "exited" if has_ended(found.instance) else "created"


def exit_code(instance: Instance) -> int:
    """The exit code; of an instance that did not start, that of `docker run`."""
    if instance.exit_code is not None:
        return instance.exit_code
    if instance.state is State.FAILED:
        return _EXIT_CODES.get(str((instance.reason or {}).get("code")), _FAILED_START)
    return 137 if instance.state is State.STOPPED else 0


def waits_because(instance: Instance) -> str:
    """Why an instance does not run yet; empty: it does, or has ended."""
    if instance.state not in {State.PENDING, State.SCHEDULED, State.STARTING}:
        return ""
    reason = instance.reason or {}
    return str(reason.get("message") or instance.state)


def tty_of(found: FoundContainer) -> bool:
    return bool(_spec(found).get("tty"))


def _spec(found: FoundContainer) -> Document:
    if found.instance is not None:
        return found.instance.spec
    return found.row.request if found.row is not None else {}


def labels_of(found: FoundContainer) -> dict[str, str]:
    own = (found.row.config.get("Labels") or {}) if found.row is not None else {}
    instance = found.instance
    if instance is None:
        return dict(own)
    more = {"mooring.instance": instance.id, "mooring.project": instance.project_id}
    if found.node_name:
        more["mooring.node"] = found.node_name
    return {**instance.labels, **own, **more}


def listed(found: FoundContainer) -> Document:
    """An item of the list."""
    spec = _spec(found)
    return {
        "Id": found.id,
        "Names": [f"/{found.name}"],
        "Image": spec.get("image", ""),
        "ImageID": image_id(spec.get("image", "")),
        "Command": " ".join([*(spec.get("entrypoint") or ()), *(spec.get("command") or ())]),
        "Created": int(_created_at(found).timestamp()),
        "Ports": [
            {"IP": each["host"], "PrivatePort": each["container"], "PublicPort": each["port"],
             "Type": each["protocol"]}
            for each in _endpoints(found)
        ] + [{"PrivatePort": port, "Type": "tcp"} for port in _proxied(found)],
        "Labels": labels_of(found),
        "State": status_of(found),
        "Status": _status_text(found),
        "HostConfig": {"NetworkMode": "bridge"},
        "NetworkSettings": {"Networks": {}},
        "Mounts": [],
    }  # fmt: skip


def inspected(found: FoundContainer) -> Document:
    """The whole description."""
    spec, config = _spec(found), found.row.config if found.row is not None else {}
    argv = [*(spec.get("entrypoint") or ()), *(spec.get("command") or ())]
    return {
        "Id": found.id,
        "Created": _text(_created_at(found)),
        "Path": argv[0] if argv else "",
        "Args": argv[1:],
        "State": _state(found),
        "Image": image_id(spec.get("image", "")),
        "Name": f"/{found.name}",
        "RestartCount": 0,
        "Driver": "mooring",
        "Platform": "linux",
        "MountLabel": "",
        "ProcessLabel": "",
        "AppArmorProfile": "",
        "ExecIDs": None,
        "HostConfig": _host_config(found, spec, config),
        "GraphDriver": {"Name": "mooring", "Data": None},
        "Mounts": [],
        "Config": _config(found, spec, config),
        "NetworkSettings": {
            "Ports": {f"{port}/tcp": None for port in _proxied(found)}
            | {
                f"{each['container']}/{each['protocol']}": [
                    {"HostIp": each["host"], "HostPort": str(each["port"])}
                ]
                for each in _endpoints(found)
            },
            "Networks": {},
            "IPAddress": "",
        },
    }


def _config(found: FoundContainer, spec: Document, config: Document) -> Document:
    env = spec.get("env") or {}
    return {
        "Hostname": found.name,
        "Domainname": "",
        "User": spec.get("user") or "",
        "AttachStdin": bool(config.get("AttachStdin")),
        "AttachStdout": bool(config.get("AttachStdout")),
        "AttachStderr": bool(config.get("AttachStderr")),
        "Tty": bool(spec.get("tty")),
        "OpenStdin": bool(spec.get("stdin")),
        "StdinOnce": bool(spec.get("stdin")),
        # Values of secrets are not known here.
        "Env": [f"{name}={value if isinstance(value, str) else '***'}" for name, value in env.items()],
        "Cmd": spec.get("command"),
        "Image": spec.get("image", ""),
        "Volumes": None,
        "WorkingDir": spec.get("working_dir") or "",
        "Entrypoint": spec.get("entrypoint"),
        "Labels": labels_of(found),
        "ExposedPorts": {f"{each['container']}/{each['protocol']}": {} for each in spec.get("ports") or ()},
    }


def _host_config(found: FoundContainer, spec: Document, config: Document) -> Document:
    gpus = (spec.get("gpus") or {}).get("count") or 0
    request: Document = {
        "Driver": "nvidia",
        "Count": gpus,
        "DeviceIDs": None,
        "Capabilities": [["gpu"]],
        "Options": {},
    }
    return {
        **(config.get("HostConfig") or {}),
        "AutoRemove": found.row is not None and found.row.auto_remove,
        "LogConfig": {"Type": "json-file", "Config": {}},
        "NetworkMode": "bridge",
        "RestartPolicy": {"Name": _RESTARTS.get(str(spec.get("restart")), "no"), "MaximumRetryCount": 0},
        "Memory": (spec.get("memory_mib") or 0) * 2**20,
        "NanoCpus": int((spec.get("cpus") or 0) * 1e9),
        "DeviceRequests": [request] if gpus else None,
    }


def _state(found: FoundContainer) -> Document:
    instance, status = found.instance, status_of(found)
    error = ""
    if instance is not None and instance.reason is not None and status != "running":
        error = str(instance.reason.get("message") or "")
    return {
        "Status": status,
        "Running": status in {"running", "restarting"},  # both, as Docker has it
        "Paused": False,
        "Restarting": status == "restarting",
        "OOMKilled": instance is not None and (instance.reason or {}).get("code") == "out_of_memory",
        "Dead": False,
        "Pid": 0,
        "ExitCode": exit_code(instance) if instance is not None and status in _HAS_EXIT_CODE else 0,
        "Error": error,
        "StartedAt": _text(instance.started_at if instance else None),
        "FinishedAt": _text(instance.stopped_at if instance else None),
    }


def _status_text(found: FoundContainer) -> str:
    instance = found.instance
    if instance is None:
        return "Created"
    if has_ended(instance):
        return f"Exited ({exit_code(instance)}) {_ago(instance.stopped_at)} ago"
    if is_up(instance):
        more = " (node unreachable)" if instance.state is State.UNREACHABLE else ""
        return f"Up {_ago(instance.started_at)}{more}"
    if is_restarting(instance):
        return f"Restarting ({exit_code(instance)})"
    if instance.desired_state is not DesiredState.RUNNING:
        return "Removing"
    return f"Created (waiting: {waits_because(instance)})"


def image_id(name: str) -> str:
    """The id of an image. Images are on the nodes, so it is derived from the name."""
    return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def _endpoints(found: FoundContainer) -> list[Document]:
    return list(found.instance.endpoints) if found.instance is not None else []


def _proxied(found: FoundContainer) -> list[int]:
    """The ports that the port proxy serves: Docker's clients know no URLs."""
    return [each["container"] for each in _spec(found).get("ports") or () if each.get("expose") == "proxy"]


def _created_at(found: FoundContainer) -> datetime:
    owner = found.row or found.instance
    assert owner is not None
    return owner.created_at


def _text(at: datetime | None) -> str:
    return _NEVER if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _ago(since: datetime | None) -> str:
    seconds = int((datetime.now(UTC) - since).total_seconds()) if since else 0
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{max(0, seconds)} seconds"
