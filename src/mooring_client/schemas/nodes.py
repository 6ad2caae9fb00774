"""Schemas of nodes, GPUs, instance types and join tokens."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.gpus import Action, Health, NvLinkPeer, Sample, Severity
from mooring_client.schemas.states import Reason
from mooring_client.schemas.text import GpuUuid, Name, Text


class NodeState(StrEnum):
    READY = "ready"
    CORDONED = "cordoned"  # nothing new is placed
    DRAINING = "draining"  # nothing new is placed; instances left at the deadline are stopped
    NOT_READY = "not_ready"  # its agent reports, but the node has a problem: see `reason`
    UNREACHABLE = "unreachable"  # its agent has been silent for longer than `unreachable_after_s`


class GpuMigDevice(Answer):
    """An existing MIG device of a GPU. It is allocated as a whole."""

    uuid: str
    profile: str
    memory_mib: int | None
    free: bool
    instance_id: Annotated[str | None, Field(description="the instance that has it; null: none or hidden")]


class GpuHolder(Answer):
    instance_id: str
    share: Annotated[float, Field(description="the allocated part of the GPU")]
    mig_uuid: str | None


class Placement(StrEnum):
    """Whether new instances are placed on a GPU."""

    NORMAL = "normal"
    LAST = "last"  # only if no other GPU fits
    NONE = "none"


class GpuCondition(Answer):
    """A present problem of a GPU. Problems of other projects' applications are hidden."""

    code: str
    severity: Annotated[Severity, Field(description="fatal: out of use; warn: used last; info: no effect")]
    action: Annotated[Action, Field(description="the action that NVIDIA recommends")]
    since: Timestamp
    last_at: Timestamp
    count: int


class GpuRecovery(Answer):
    """The recovery of a GPU."""

    step: Literal["waiting_for_holder", "reset", "self_test", "probation", "service_required"]
    since: Timestamp
    detail: str | None


class GpuIncident(Answer):
    """An incident of a GPU. Equal incidents within an hour count as one."""

    id: str
    gpu_uuid: str
    code: str
    severity: Severity
    action: Action
    message: Annotated[str, Field(description="node's message; other projects see the code's description")]
    instance_id: Annotated[str | None, Field(description="the instance that has it; null: none or hidden")]
    since: Timestamp
    last_at: Timestamp
    count: int


class GpuIncidentList(Answer):
    items: Annotated[list[GpuIncident], Field(max_length=200)]
    next_cursor: str | None


class Gpu(Answer):
    uuid: str
    node_id: str
    node_name: str
    index: int
    model: str
    memory_mib: int
    pci_bus_id: str | None
    numa_node: int | None
    compute_capability: str | None
    nvlink_peers: list[NvLinkPeer]
    mig_mode: str | None
    mig_devices: list[GpuMigDevice]
    health: Health
    reason: Annotated[Reason | None, Field(description="why the GPU is unhealthy; null: healthy")]
    conditions: Annotated[list[GpuCondition], Field(max_length=64, description="problems, worst first")]
    placement: Annotated[Placement, Field(description="last: used only if no other GPU fits")]
    recovery: GpuRecovery | None
    share_free: Annotated[float, Field(description="the part of the GPU that is not allocated")]
    instance_id: Annotated[str | None, Field(description="its only instance; null: none, several or hidden")]
    holders: Annotated[list[GpuHolder], Field(max_length=1000, description="its instances that you may see")]
    sample: Annotated[
        Sample | None,
        Field(
            description="only with `samples=true`; null: no metrics, or those of another project's instance"
        ),
    ]
    simulated: bool


class GpuList(Answer):
    items: Annotated[list[Gpu], Field(max_length=200)]
    next_cursor: str | None


class Versions(Answer):
    agent: str | None
    docker: str | None
    driver: str | None
    cuda: str | None


class FactChange(Answer):
    """A fact whose reported value differs from the approved one."""

    fact: Annotated[str, Field(description="such as `cpus`; `gpu`: a whole GPU that is not approved")]
    gpu_uuid: Annotated[str | None, Field(description="the GPU of this fact; null: a fact of the node")]
    approved: Annotated[JsonValue, Field(description="null: nothing is approved")]
    reported: JsonValue
    node_id: Annotated[str | None, Field(description="the other node that has this GPU; null: none")]


class FactsChanged(Answer):
    """How a node's report differs from the approved facts. Admins accept it with `approve`."""

    id: Annotated[str, Field(description="identifies this difference in `difference_id`")]
    changes: list[FactChange]


class Storage(Answer):
    """The filesystem that holds the node's containers and images."""

    driver: Annotated[str, Field(description="Docker's storage driver")]
    filesystem: Annotated[str | None, Field(description="filesystem under the driver; null: unknown")]
    available_mib: Annotated[int, Field(description="free space now, rounded")]
    images_mib: Annotated[int, Field(description="sum of the image sizes; shared layers count each time")]
    pressure: Annotated[bool, Field(description="too little is free to place new instances")]


class Orphan(Answer):
    """A container with Mooring's labels that is neither assigned to the node nor to be removed."""

    container_id: Text
    name: Text
    instance_id: Text
    control_plane_id: Text | None
    gpu_uuids: Annotated[
        list[GpuUuid],
        Field(max_length=256, description="the GPUs or MIG devices that it uses; nothing is placed on them"),
    ] = []


class Node(Answer):
    id: str
    name: str
    state: NodeState
    reason: Reason | None
    cordoned: bool
    draining: bool
    drain_deadline_at: Timestamp | None
    hostname: str | None
    address: str | None
    labels: dict[str, str]
    cpus: int | None
    memory_mib: int | None
    cpus_free: float | None
    memory_mib_free: int | None
    disk_mib: Annotated[int | None, Field(description="size of the filesystem; null: not reported")]
    disk_allocatable_mib: Annotated[int | None, Field(description="the part that instances may use")]
    disk_mib_free: Annotated[int | None, Field(description="allocatable space that is not allocated")]
    disk_enforced: Annotated[bool | None, Field(description="whether Docker enforces `disk_mib`")]
    storage: Storage | None
    versions: Versions
    gpus: list[Gpu]
    orphans: Annotated[list[Orphan], Field(description="unknown containers with Mooring's labels")]
    overrides: Annotated[list[str], Field(description="safety checks that the node's operator turned off")]
    reserved_for: Annotated[list[str] | None, Field(description="its projects that you may see; null: all")]
    facts_changed: FactsChanged | None
    simulated: bool
    version: Annotated[int, Field(description="rises with each change by an admin")]
    last_heartbeat_at: Timestamp | None
    created_at: Timestamp


class NodeList(Answer):
    items: Annotated[list[Node], Field(max_length=200)]
    next_cursor: str | None


class NodePatch(Body):
    # The default is never used: only a field that was sent is read.
    reserved_for: Annotated[
        list[Annotated[Text, Field(max_length=64)]] | None,
        Field(
            min_length=1,
            max_length=64,
            description="the projects whose instances may be placed here; null: all projects",
        ),
    ] = None


class Approve(Body):
    difference_id: Annotated[
        Text | None,
        Field(
            max_length=64,
            description="`facts_changed.id` as you read it; 409 if the node reports other facts now",
        ),
    ] = None


class Drain(Body):
    deadline_s: Annotated[
        int | None,
        Field(ge=0, le=30 * 86_400, description="seconds until instances are stopped; null: never"),
    ] = None


class InstanceType(Answer):
    """A number of GPUs of one model, or one MIG device of such a GPU."""

    name: str
    gpu_model: str
    gpu_count: int
    gpu_memory_mib: Annotated[int, Field(description="of each GPU, or of the MIG device")]
    mig_profile: Annotated[str | None, Field(description="null: whole GPUs")]
    total: Annotated[int, Field(description="how many the healthy GPUs could run at once")]
    available: Annotated[int, Field(description="how many could start now")]
    max_gpus_per_node_now: int
    max_share_now: Annotated[
        float | None,
        Field(
            description="the largest share of one GPU that you could start now; null: several GPUs, or MIG"
        ),
    ]
    price_micros_per_hour: int | None
    currency: str | None


class InstanceTypeList(Answer):
    items: list[InstanceType]
    next_cursor: str | None


class JoinTokenCreate(Body):
    ttl_s: Annotated[int, Field(ge=1, le=86_400, description="lifetime in seconds")] = 3600
    node_name: Annotated[Name | None, Field(description="name of the node; null: the node chooses")] = None


class JoinToken(Answer):
    id: str
    token: Annotated[str, Field(description="the token, shown only once; it works once")]
    node_name: str | None
    expires_at: Timestamp
