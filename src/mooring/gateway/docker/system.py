"""What Docker clients ask of an engine as a whole: who it is, its containers, and its images."""

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from mooring import __version__
from mooring.control.instances import docker_containers
from mooring.core.access import Permission
from mooring.gateway.docker import filters, http, views
from mooring.gateway.docker.create import DEFAULT_NETWORKS, ONE_NETWORK, refused
from mooring.gateway.docker.shared import DockerCall
from mooring_client.errors import BadRequest, NotFound, NotImplementedHere

_MAX_NAME: Final = 512
_PULLED: Final = "mooring: nodes pull images when instances start"
_LOGIN: Final = "mooring: credentials of docker login are not used; see POST /v1/registries"


async def ping(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /_ping`"""
    await call.connection.answer_bytes(200, b"OK", "text/plain; charset=utf-8", [("Builder-Version", "1")])


async def version(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /version`"""
    component = {"Name": "Mooring", "Version": __version__, "Details": {"ApiVersion": http.API_VERSION}}
    await call.connection.answer(
        200,
        {
            "Platform": {"Name": "Mooring"},
            "Components": [component],
            "Version": __version__,
            "ApiVersion": http.API_VERSION,
            "MinAPIVersion": http.MIN_API_VERSION,
            "Os": "linux",
            "Arch": "amd64",
            "GitCommit": "",
            "GoVersion": "",
            "KernelVersion": "",
            "BuildTime": "",
        },
    )


async def info(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /info`"""
    access = call.access(Permission.READ)
    found = await call.shared.read(partial(docker_containers.listed, access=access))
    nodes = await call.api("GET", "/v1/nodes?limit=200")
    items: Any = nodes.get("items") or []
    states = [views.status_of(each) for each in found]
    gpus = sum(len(node.get("gpus") or ()) for node in items)
    await call.connection.answer(
        200,
        {
            "ID": "mooring",
            "Name": "mooring",
            "ServerVersion": f"mooring-{__version__}",
            "OperatingSystem": f"Mooring {__version__} ({len(items)} nodes, {gpus} GPUs)",
            "OSType": "linux",
            "Architecture": "x86_64",
            "Driver": "mooring",
            "DriverStatus": [["Nodes", str(len(items))], ["GPUs", str(gpus)], ["Caller", call.caller.name]],
            "Containers": len(states),
            "ContainersRunning": states.count("running"),
            "ContainersPaused": 0,
            "ContainersStopped": len(states) - states.count("running"),
            "Images": 0,
            "NCPU": int(sum(node.get("cpus") or 0 for node in items)),
            "MemTotal": sum(node.get("memory_mib") or 0 for node in items) * 2**20,
            "LoggingDriver": "json-file",
            "CgroupDriver": "systemd",
            "CgroupVersion": "2",
            "MemoryLimit": True,
            "SwapLimit": False,
            "CPUShares": False,
            "IPv4Forwarding": True,
            "Plugins": {"Volume": [], "Network": [], "Authorization": None, "Log": ["json-file"]},
            "Runtimes": {},
            "DefaultRuntime": "",
            "Swarm": {"LocalNodeState": "inactive"},
            "SecurityOptions": [],
            "RegistryConfig": {"InsecureRegistryCIDRs": [], "IndexConfigs": {}, "Mirrors": []},
            "Warnings": None,
            "Labels": [],
        },
    )


async def listed(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /containers/json`"""
    wanted = filters.parsed(call.request.params.get("filters"), filters.CONTAINER_FILTERS)
    access = call.access(Permission.READ)
    found = await call.shared.read(partial(docker_containers.listed, access=access))
    limit = call.request.number("limit", 0, 100_000)
    is_all = call.request.flag("all") or limit > 0 or "status" in wanted or "exited" in wanted
    shown = [
        each
        for each in found
        if (is_all or views.status_of(each) in {"running", "restarting"}) and filters.matches(each, wanted)
    ]
    await call.connection.answer(200, [views.listed(each) for each in shown[: limit if limit > 0 else None]])


async def inspected(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /containers/{id}/json`"""
    await call.connection.answer(200, views.inspected(await call.find(match["id"])))


# Images: nodes pull them when instances start.


async def images(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /images/json`: none, because images are on the nodes."""
    await call.connection.answer(200, [])


async def image(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /images/{name}/json`: what is known of an image, which is its name, once a client has named it."""
    name = await _known(call, match["name"])
    document: Mapping[str, Any] = {
        "Id": views.image_id(name),
        "RepoTags": [name],
        "RepoDigests": [],
        "Comment": _PULLED,
        "Created": "1970-01-01T00:00:00Z",
        "Architecture": "amd64",
        "Os": "linux",
        "Size": 0,
        "Config": {},
        "RootFS": {"Type": "layers", "Layers": []},
        "Metadata": {},
    }
    await call.connection.answer(200, document)


async def _known(call: DockerCall, reference: str) -> str:
    """The name of an image that the caller has pulled lately, or of a container that the caller sees.

    Args:
        reference: its name, or the id of a container's image.

    Raises:
        NotFound.
    """
    name = _short(reference)
    names = {name, f"{name}:latest", name.removesuffix(":latest")}
    if any((call.caller.id, each) in call.shared.pulled for each in names):
        return reference
    access = call.access(Permission.READ)
    found = await call.shared.read(partial(docker_containers.listed, access=access))
    for image in (str(views.listed(each)["Image"]) for each in found):
        if _short(image) in names:
            return reference
        if views.image_id(image).removeprefix("sha256:") == reference.removeprefix("sha256:"):
            return image
    raise NotFound(f"No such image: {reference}")


def _short(name: str) -> str:
    """The name as people write it; clients add the registry's."""
    return name.removeprefix("docker.io/").removeprefix("library/")


async def pull(call: DockerCall, _match: re.Match[str]) -> None:
    """`POST /images/create`: says that nothing is pulled now."""
    await call.connection.body()
    params = call.request.params
    if params.get("fromSrc"):
        raise refused("docker import", "push the image to a registry")
    name, tag = params.get("fromImage", ""), params.get("tag", "")
    whole = f"{name}{'@' if tag.startswith('sha256:') else ':' if tag else ''}{tag}"
    if not 0 < len(whole) <= _MAX_NAME:
        raise BadRequest("the name of the image is not valid")
    call.shared.pulled[call.caller.id, _short(whole)] = None
    await call.connection.begin("application/json")
    await call.connection.write_document({"status": f"{_PULLED}: {whole}"})
    if call.request.headers.get("x-registry-auth", "") not in {"", "e30=", "e30"}:
        await call.connection.write_document({"status": _LOGIN})
    await call.connection.end()


async def no_volumes(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /volumes`"""
    await call.connection.answer(200, {"Volumes": [], "Warnings": []})


async def networks(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /networks`"""
    wanted = filters.parsed(call.request.params.get("filters"), {"name", "id", "driver", "scope", "label"})
    shown = all(any(_has(field, value) for value in values) for field, values in wanted.items())
    await call.connection.answer(200, [_NETWORK] if shown else [])


def _has(field: str, value: str) -> bool:
    match field:
        case "name":
            return value in _NETWORK["Name"]
        case "id":
            return bool(_NETWORK["Id"].startswith(value))
        case "label":
            return False
    return bool(_NETWORK[field.capitalize()] == value)


async def network(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /networks/{id}`"""
    name = match["name"]
    if name not in DEFAULT_NETWORKS and not _NETWORK["Id"].startswith(name):
        raise NotFound(f"network {name} not found")
    await call.connection.answer(200, _NETWORK)


async def no_such(_call: DockerCall, match: re.Match[str]) -> None:
    """What `docker inspect` asks for when there is no such container, and what `compose down` removes.

    Raises:
        NotFound: always.
    """
    raise NotFound(f"No such {match['kind']}: {match['name']}")


_NETWORK: Final[Mapping[str, Any]] = {
    "Name": "bridge", "Id": hashlib.sha256(b"mooring default").hexdigest(), "Scope": "local",
    "Driver": "bridge", "EnableIPv6": False, "Internal": False, "Attachable": False, "Ingress": False,
    "IPAM": {"Driver": "default", "Options": {}, "Config": []}, "Containers": {}, "Options": {}, "Labels": {},
    "Created": "1970-01-01T00:00:00Z",
}  # fmt: skip


async def not_implemented(call: DockerCall, match: re.Match[str]) -> None:
    """A part of Docker's API that instances do not have."""
    path = match[0]
    for start, reason in _MISSING.items():
        if path.startswith(start) or path.endswith(start):
            raise NotImplementedHere(f"mooring: {reason}")
    raise NotImplementedHere(f"mooring: {call.request.method} {path[:200]} is not supported")


_MISSING: Final[Mapping[str, str]] = {
    "/build": "images are not built here: build elsewhere, and push to a registry",
    "/commit": "images are not built here: build elsewhere, and push to a registry",
    "/images": "images are on the nodes: use a registry",
    "/volumes": "named volumes are not available yet",
    "/networks": ONE_NETWORK,
    "/auth": "credentials of registries are stored with POST /v1/registries",
    "/system/df": "images and disks are on the nodes: see GET /v1/nodes",
    "/plugins": "the node's operator decides",
    "/swarm": "there is no swarm: see /v1/instance-groups",
    "/services": "there is no swarm: see /v1/instance-groups",
    "/session": "images are not built here: build elsewhere, and push to a registry",
    "/pause": "instances cannot be paused: stop them",
    "/unpause": "instances cannot be paused: stop them",
    "/update": "resources cannot be changed: create another instance; for labels and priority, PATCH "
    "/v1/instances/{id}",
    "/prune": "remove containers one by one",
    "/changes": "docker diff is not supported",
    "/export": "docker export is not supported: use docker cp",
}
