"""Pods of Prime Intellect's API: what a request for one asks for, and how an instance looks as one.

A pod is an instance with the label `prime/pod`, whose value is the pod's name. Prime's names need not be
unique and instances' must be, so an instance has the pod's name only while no other instance has it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from mooring.control.instances import admission, instances
from mooring.control.nodes.instance_types import InstanceShape
from mooring.core.access import Access
from mooring.core.node import proportional
from mooring.db.tables import Instance
from mooring.scheduler.model import NodeView
from mooring.settings import Settings
from mooring_client.errors import InsufficientCapacity, NameTaken, NotFound
from mooring_client.schemas.base import Json, timestamp
from mooring_client.schemas.projects import DisplayName
from mooring_client.schemas.skypilot import (
    CPU_ONLY,
    DEFAULT_REGION,
    DEFAULT_ZONE,
    PROVIDER,
    accelerator,
    gpu_type,
)
from mooring_client.schemas.spec import GpuRequest, InstanceRequest
from mooring_client.schemas.ssh_keys import PublicKey
from mooring_client.schemas.states import DesiredState, State
from mooring_client.schemas.text import DNS_LABEL, Text

LABEL: Final = "prime/pod"
_MIB_PER_GB: Final = 1024
# The disk that SkyPilot asks for if the task does not say.
_SKYPILOT_DISK_GB: Final = 256
_LEAST_DISK_MIB: Final = 64  # that an instance can ask for
# Prime's word for "anywhere".
_ANYWHERE: Final = "UNSPECIFIED"
# SkyPilot knows no other words. A pod that is unreachable still has its GPUs, so it is not made again.
_STATUS: Final[Mapping[State, str]] = {
    State.PENDING: "PROVISIONING",
    State.SCHEDULED: "PROVISIONING",
    State.STARTING: "PROVISIONING",
    State.RUNNING: "ACTIVE",
    State.UNREACHABLE: "ACTIVE",
    State.STOPPING: "DELETING",
    State.STOPPED: "STOPPED",
    State.SUCCEEDED: "STOPPED",
    State.FAILED: "ERROR",
    State.DELETED: "TERMINATED",
}


class _PrimeBody(BaseModel):
    # Prime's clients also send fields that mean nothing here, and may send others tomorrow.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class PrimeSshKey(_PrimeBody):
    """A public key to register."""

    name: DisplayName
    public_key: Annotated[PublicKey, Field(alias="publicKey")]


class PrimePod(_PrimeBody):
    """What a pod should have. Memory and disk are in gigabytes, which count as GiB."""

    name: Annotated[Text, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
    gpu_type: Annotated[Text, Field(alias="gpuType", max_length=128)]
    gpu_count: Annotated[int, Field(alias="gpuCount", ge=1, le=64)] = 1
    disk_size: Annotated[int | None, Field(alias="diskSize", ge=1, le=2**20)] = None
    vcpus: Annotated[int | None, Field(ge=1, le=4096)] = None
    memory: Annotated[int | None, Field(ge=1, le=2**20)] = None
    country: Annotated[Text | None, Field(max_length=255)] = None
    data_center_id: Annotated[Text | None, Field(alias="dataCenterId", max_length=255)] = None


class PrimeTeam(_PrimeBody):
    """Prime's teams are projects here."""

    team_id: Annotated[Text | None, Field(alias="teamId", max_length=64)] = None


class PrimePodCreate(_PrimeBody):
    """A request for a pod. `provider` and `maxPrice` say nothing that matters here."""

    pod: PrimePod
    team: PrimeTeam | None = None

    @property
    def project_id(self) -> str | None:
        return self.team.team_id if self.team else None


def request_of(
    pod: PrimePod, image: str, shapes: Iterable[InstanceShape], nodes: Iterable[NodeView]
) -> InstanceRequest:
    """The request for the instance of a pod, still without a name.

    Args:
        image: SkyPilot logs in and sets it up, so its own command is replaced by one that only waits.
        shapes: the instance types of the inventory.
        nodes: the inventory itself.

    Raises:
        InsufficientCapacity: no node has GPUs of this type.
    """
    gpus = _gpus(pod, shapes)
    return InstanceRequest(
        image=image,
        entrypoint=["sleep"],
        command=["infinity"],
        gpus=gpus,
        cpus=pod.vcpus,
        memory_mib=None if pod.memory is None else pod.memory * _MIB_PER_GB,
        disk_mib=_disk_mib(pod, gpus, nodes),
        labels={LABEL: pod.name},
        node_selector=_selector(pod),
        # SkyPilot waits without limit for a pod that is being provisioned, so none may wait in the queue.
        on_capacity="fail",
        on_preemption="stop",
    )


def _gpus(pod: PrimePod, shapes: Iterable[InstanceShape]) -> GpuRequest:
    if pod.gpu_type == CPU_ONLY:
        return GpuRequest()
    wanted = pod.gpu_type.casefold()
    whole = [each for each in shapes if each.mig_profile is None]
    found = [each for each in whole if wanted in _names(each)]
    if not found:
        listed = ", ".join(sorted({gpu_type(each.gpu_model, each.gpu_memory_mib) for each in whole}))
        raise InsufficientCapacity(
            f"no node has a GPU of the type {pod.gpu_type}; there are: {listed or 'none'}"
        )
    models = list(dict.fromkeys(each.gpu_model for each in found))[:16]
    return GpuRequest(
        count=pod.gpu_count, model=models, min_memory_mib=min(each.gpu_memory_mib for each in found)
    )


def _names(shape: InstanceShape) -> set[str]:
    model, memory_mib = shape.gpu_model, shape.gpu_memory_mib
    return {gpu_type(model, memory_mib).casefold(), accelerator(model, memory_mib).casefold()}


def _disk_mib(pod: PrimePod, gpus: GpuRequest, nodes: Iterable[NodeView]) -> int | None:
    """The requested disk, but of SkyPilot's default at most the fair share for these GPUs or CPUs.

    Otherwise a few pods, for which nobody has chosen a size, would fill the disk of a node with free GPUs.
    """
    if pod.disk_size is None:
        return None
    asked = min(pod.disk_size * _MIB_PER_GB, 2**31 - 1)
    if pod.disk_size != _SKYPILOT_DISK_GB:
        return asked
    shares = [share for node in nodes if (share := _disk_share(pod, gpus, node))]
    return max(_LEAST_DISK_MIB, min(asked, *shares)) if shares else None


def _disk_share(pod: PrimePod, gpus: GpuRequest, node: NodeView) -> int:
    """MiB; 0: the node cannot have this pod, or does not report its disk."""
    if gpus.count:
        part, whole = gpus.count, sum(gpu.model in (gpus.model or ()) for gpu in node.gpus)
    else:
        part, whole = (pod.vcpus or 1) * 1000, node.cpu_milli
    return proportional(node.disk_mib or 0, part, whole) if part <= whole else 0


def _selector(pod: PrimePod) -> dict[str, str]:
    wanted = {"region": (pod.country, DEFAULT_REGION), "zone": (pod.data_center_id, DEFAULT_ZONE)}
    return {label: value for label, (value, usual) in wanted.items() if value not in {None, usual, _ANYWHERE}}


def named(session: Session, project_id: str, request: InstanceRequest) -> InstanceRequest:
    """The request with the pod's name if an instance can have it, else without one that is like it."""
    pod_name = request.labels[LABEL]
    if re.fullmatch(DNS_LABEL, pod_name):
        try:
            admission.require_free_names(session, project_id, [pod_name])
        except NameTaken:
            pass
        else:
            return request.model_copy(update={"name": pod_name})
    return request.model_copy(update={"name": admission.generated_name(pod_name)})


def is_pod() -> ColumnElement[bool]:
    has_label: ColumnElement[bool] = Instance.labels[LABEL].as_string().is_not(None)
    return has_label


def get(session: Session, access: Access, pod_id: str) -> Instance:
    """Raises NotFound: there is no such instance that the caller may see, or it is no pod."""
    row = instances.get(session, access, pod_id)
    if LABEL not in row.labels:
        raise NotFound(f"no pod {pod_id}")
    return row


def shown(row: Instance, settings: Settings) -> Json:
    """An instance as a pod. It has an address once it runs, which is that of the SSH gateway."""
    status = _status(row)
    address = settings.ssh_address if status == "ACTIVE" else None
    gpus: dict[str, Any] = row.spec["gpus"]
    models, memory_mib = gpus["model"], gpus["min_memory_mib"]
    has_type = bool(isinstance(models, list) and models and memory_mib)
    return {
        "id": row.id,
        "name": row.labels[LABEL],
        "status": status,
        "providerType": PROVIDER,
        "ip": address and address[0],
        "sshConnection": address and f"{row.id}@{address[0]} -p {address[1]}",
        "gpuName": gpu_type(models[0], memory_mib) if has_type else CPU_ONLY,
        "gpuCount": gpus["count"],
        "createdAt": timestamp(row.created_at),
        "teamId": row.project_id,
        "installationFailure": (row.reason or {}).get("message") if status == "ERROR" else None,
        "resources": {"vcpus": row.spec["cpus"], "memory": _gb(row.spec["memory_mib"])},
        "priceHr": None,
        "socket": "PCIe",
        "type": "HOSTED",
    }


def _status(row: Instance) -> str:
    return "DELETING" if row.desired_state is DesiredState.DELETED else _STATUS[row.state]


def _gb(memory_mib: int | None) -> int | None:
    return None if memory_mib is None else memory_mib // _MIB_PER_GB
