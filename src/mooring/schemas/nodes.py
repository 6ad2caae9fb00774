"""Nodes, their GPUs, what can be asked for, and the tokens that machines join with."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from mooring.core.gpu import GpuPlacement, Health, NvLinkPeer
from mooring.core.instance.state import Reason
from mooring.core.node import NodeState
from mooring.core.text import Name, Text
from mooring.core.xid import Action, Severity
from mooring.schemas.agent import Orphan
from mooring.schemas.base import Answer, Body, Timestamp


class GpuMigDevice(Answer):
    """A MIG device that exists on the card; it is given out whole."""

    uuid: str
    profile: str
    memory_mib: int | None
    free: bool
    instance_id: Annotated[str | None, Field(description="its holder, as far as the caller may know")]


class GpuHolder(Answer):
    instance_id: str
    share: Annotated[float, Field(description="of the card; of a MIG device what it counts as")]
    mig_uuid: str | None


class GpuCondition(Answer):
    """Something that is wrong with a GPU now, as far as the caller may know."""

    code: str
    severity: Annotated[
        Severity, Field(description="fatal: it is out of use; warn: it is given out last; info: neither")
    ]
    action: Annotated[Action, Field(description="what NVIDIA says should be done")]
    since: Timestamp
    last_at: Timestamp
    count: int


class GpuRecovery(Answer):
    """What is being done to bring a GPU back."""

    step: Literal["waiting_for_holder", "reset", "self_test", "probation", "service_required"]
    since: Timestamp
    detail: str | None


class GpuIncident(Answer):
    """Something that happened to a GPU; equal ones of one hour are counted as one."""

    id: str
    gpu_uuid: str
    code: str
    severity: Severity
    action: Action
    message: Annotated[
        str,
        Field(description="the node's for admins and the project whose instance had it; else of the code"),
    ]
    instance_id: Annotated[str | None, Field(description="who had it, as far as the caller may know")]
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
    reason: Annotated[
        Reason | None,
        Field(
            description="the message is the node's for admins and the project that had it; else of the code"
        ),
    ]
    conditions: Annotated[list[GpuCondition], Field(max_length=64, description="the worst first")]
    placement: Annotated[
        GpuPlacement, Field(description="last: new work is put on it only where nothing else fits")
    ]
    recovery: GpuRecovery | None
    share_free: Annotated[float, Field(description="the part of it that nobody holds")]
    instance_id: Annotated[
        str | None,
        Field(description="its only holder, as far as the caller may know; null where there are several"),
    ]
    holders: Annotated[
        list[GpuHolder], Field(max_length=1000, description="those that the caller may know of")
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
    """One fact that a node reports differently from what is approved."""

    fact: Annotated[str, Field(description="its name, as `cpus`; `gpu`: a whole GPU that is not approved")]
    gpu_uuid: Annotated[str | None, Field(description="the GPU that the fact is of; null: of the node")]
    approved: Annotated[JsonValue, Field(description="null: nothing")]
    reported: JsonValue
    node_id: Annotated[
        str | None,
        Field(
            description="the node that has this GPU approved: it is left out here, and this node stays ready"
        ),
    ]


class FactsChanged(Answer):
    """Where a node's last report differs from what is approved; admins accept it with `approve`."""

    id: Annotated[str, Field(description="names this difference, for `difference_id`")]
    changes: list[FactChange]


class Storage(Answer):
    """The filesystem that holds the node's containers and images."""

    driver: Annotated[str, Field(description="Docker's storage driver")]
    filesystem: Annotated[str | None, Field(description="that the driver stores on")]
    available_mib: Annotated[int, Field(description="free on it now, in coarse steps")]
    images_mib: Annotated[int, Field(description="the images' sizes, added up; shared layers count for each")]
    pressure: Annotated[bool, Field(description="so little is free that nothing new is placed")]


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
    disk_mib: Annotated[int | None, Field(description="of the whole filesystem; null: not reported")]
    disk_allocatable_mib: Annotated[int | None, Field(description="what instances may have of it")]
    disk_mib_free: Annotated[int | None, Field(description="of that, what no instance was given")]
    disk_enforced: Annotated[bool | None, Field(description="whether Docker holds containers to `disk_mib`")]
    storage: Storage | None
    versions: Versions
    gpus: list[Gpu]
    orphans: Annotated[list[Orphan], Field(description="containers with our labels that nobody here knows")]
    overrides: Annotated[list[str], Field(description="safeguards that its operator has turned off")]
    reserved_for: Annotated[
        list[str] | None,
        Field(
            description="the only projects whose instances are placed here, as far as the caller is in them; "
            "null: every project's"
        ),
    ]
    facts_changed: FactsChanged | None
    simulated: bool
    version: Annotated[int, Field(description="rises with every change that an admin makes")]
    last_heartbeat_at: Timestamp | None
    created_at: Timestamp


class NodeList(Answer):
    items: Annotated[list[Node], Field(max_length=200)]
    next_cursor: str | None


class NodePatch(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"reserved_for": ["prj_01k…"]}]})

    # Only what was sent is read, so this default never is.
    reserved_for: Annotated[
        list[Annotated[Text, Field(max_length=64)]] | None,
        Field(
            min_length=1,
            max_length=64,
            description="the only projects whose instances are placed here from now on, CPU-only ones "
            "included; null: every project's",
        ),
    ] = None


class Approve(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"difference_id": "5f2b8c1d9e0a4476"}]})

    difference_id: Annotated[
        Text | None,
        Field(
            max_length=64,
            description="`facts_changed.id` as you read it; refused if the node reports something else now",
        ),
    ] = None


class Drain(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"deadline_s": 3600}]})

    deadline_s: Annotated[
        int | None, Field(ge=0, le=30 * 86_400, description="then what is left is stopped; null: never")
    ] = None


class InstanceType(Answer):
    """A number of GPUs of one model, or a MIG device on one, as nodes have them."""

    name: str
    gpu_model: str
    gpu_count: int
    gpu_memory_mib: Annotated[int, Field(description="of each GPU, or of the MIG device")]
    mig_profile: Annotated[str | None, Field(description="null: whole GPUs")]
    total: Annotated[int, Field(description="how many of these the healthy inventory could hold at once")]
    available: Annotated[int, Field(description="how many of these could start now")]
    max_gpus_per_node_now: int
    max_share_now: Annotated[
        float | None,
        Field(
            description="the largest share of one such GPU that could start now in a project of the caller's "
            "that may share; null for several GPUs and MIG devices"
        ),
    ]
    price_micros_per_hour: int | None
    currency: str | None


class InstanceTypeList(Answer):
    items: list[InstanceType]
    next_cursor: str | None


class JoinTokenCreate(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"ttl_s": 3600, "node_name": "gpu-7"}]})

    ttl_s: Annotated[int, Field(ge=1, le=86_400)] = 3600
    node_name: Annotated[Name | None, Field(description="the only name the token is good for")] = None


class JoinToken(Answer):
    id: str
    token: Annotated[str, Field(description="shown this once; good for one join")]
    node_name: str | None
    expires_at: Timestamp
