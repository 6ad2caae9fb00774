"""The fields of requests that several methods take, as typed keyword arguments."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from mooring_client.schemas.spec import GpuRequest, Port, SecretReference, VolumeMount

Gpus = int | GpuRequest | Mapping[str, Any]
Env = Mapping[str, str | SecretReference | Mapping[str, str]]
Ports = Sequence[int | Port | Mapping[str, Any]]
Volumes = Sequence[VolumeMount | Mapping[str, Any]]


class TemplateFields(TypedDict, total=False):
    """What an instance runs, and what it needs; omitted fields have the server's defaults.

    `gpus` may be a number, `ports` may have numbers of TCP ports.
    """

    command: Sequence[str] | None
    entrypoint: Sequence[str] | None
    working_dir: str | None
    user: str | None
    env: Env
    tty: bool
    stdin: bool
    attach: bool
    gpus: Gpus
    cpus: float | None
    memory_mib: int | None
    shm_mib: int | None
    disk_mib: int | None
    ports: Ports
    volumes: Volumes
    labels: Mapping[str, str]
    max_duration_s: int | None
    restart: Literal["never", "on_failure", "always"]
    on_capacity: Literal["queue", "fail"]
    on_node_loss: Literal["keep", "replace"]
    priority: int
    preemptible: bool
    on_preemption: Literal["requeue", "stop"]
    preemption_grace_s: int
    node_selector: Mapping[str, str]


class InstanceFields(TemplateFields, total=False):
    """The fields of a new instance but `image`."""

    name: str | None
    project_id: str | None


class ProjectFields(TypedDict, total=False):
    """The settings of a project; omitted ones have the server's defaults, omitted quotas no limit."""

    labels: Mapping[str, str]
    quotas: Mapping[str, Any]
    weight: float
    allowed_images: Sequence[str] | None
    security_profile: Literal["standard", "strict"]
    max_priority: int | None
    guaranteed_gpus: int | None
    gpu_sharing: bool
    host_network: bool
    node_selector: Mapping[str, str]
    local_images: bool
    require_disk_limits: bool
    public_ports: bool


def spec_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the form of the API: `gpus=2` as `{"count": 2}`, port 80 as `{"container": 80}`."""
    given = dict(fields)
    if isinstance(given.get("gpus"), int):
        given["gpus"] = {"count": given["gpus"]}
    if "ports" in given:
        given["ports"] = [{"container": port} if isinstance(port, int) else port for port in given["ports"]]
    return given
