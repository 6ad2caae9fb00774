"""Schemas of instances."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.gpus import Sample
from mooring_client.schemas.queue import Because
from mooring_client.schemas.spec import (
    DEFAULT_PRIORITY,
    InstanceLabels,
    InstanceRequest,
    InstanceSpec,
)
from mooring_client.schemas.states import DesiredState, Reason, State
from mooring_client.schemas.text import LongText, Name

# exclusive: whole GPUs. mig: a MIG device. mps: the MPS daemon limits memory and SMs. shared: the agent kills
# containers that exceed their share of memory; nothing limits SMs.
Isolation = Literal["exclusive", "mig", "mps", "shared"]


class InstanceCreate(InstanceRequest):
    """A new instance. Only `image` is required; without `gpus`, the container has no GPU."""


class InstanceApply(InstanceRequest):
    """All that is requested of an instance, as in a create. An omitted field has its default."""


class InstancePatch(Body):
    """The fields to change. Omitted fields stay unchanged."""

    # The defaults are never used: only the fields that were sent are read.
    name: Annotated[Name, Field(default_factory=str)]
    labels: InstanceLabels = {}
    max_duration_s: Annotated[int | None, Field(ge=1, le=3660 * 86_400, description="null: no limit")] = None
    priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY


class InstanceStop(Body):
    timeout_s: Annotated[int, Field(ge=0, le=3600, description="seconds between SIGTERM and SIGKILL")] = 10


class Device(Answer):
    uuid: str
    index: int
    model: str
    memory_mib: int
    share: Annotated[float, Field(description="the allocated part of the GPU; 1: all of it")]
    mig_uuid: Annotated[str | None, Field(description="the allocated MIG device; null: none")]


class Granted(Answer):
    """The allocated resources: as requested, or the default in proportion to the allocated GPUs."""

    cpus: float
    memory_mib: int
    disk_mib: Annotated[int | None, Field(description="null: no limit (placed by an earlier release)")]
    isolation: Annotated[Isolation | None, Field(description="how its GPUs are isolated; null: no GPUs")]
    link_score: Annotated[float | None, Field(description="1: best connected GPUs; null: fewer than two")]
    borrowed: Annotated[bool, Field(description="beyond the project's guarantee, so it may be preempted")]


class InstanceEndpoint(Answer):
    """Where a port is reached while the instance runs."""

    container: int
    protocol: Literal["tcp", "udp"]
    host: Annotated[str, Field(description="of the node; with `expose: proxy` that of `url`")]
    port: Annotated[int, Field(description="on the node; with `expose: proxy` that of `url`")]
    url: Annotated[str | None, Field(description="through the port proxy; null: udp, or there is no proxy")]


class Instance(InstanceSpec):
    """An instance: the fields of its request, its state and its placement."""

    model_config = ConfigDict(extra="ignore", strict=False)

    id: str
    name: str
    project_id: str
    labels: dict[str, str]
    state: State
    desired_state: DesiredState
    reason: Reason | None
    version: int
    generation: int
    attempt: int
    node_id: str | None
    node_name: str | None
    group_id: str | None
    group_rank: int | None
    granted: Granted | None
    devices: list[Device]
    endpoints: list[InstanceEndpoint]
    container_id: str | None
    image_digest: str | None
    exit_code: int | None
    queue_position: int | None
    actions: list[str]
    simulated: bool
    created_at: Timestamp
    scheduled_at: Timestamp | None
    started_at: Timestamp | None
    stopped_at: Timestamp | None
    expires_at: Timestamp | None


class InstanceList(Answer):
    items: Annotated[list[Instance], Field(max_length=200)]
    next_cursor: str | None


class RefusalItem(Answer):
    node_id: str
    node_name: str
    code: str
    wanted: str
    had: str


class Alternatives(Answer):
    """Changed requests that would start now."""

    max_count_now: Annotated[int, Field(description="the largest `gpus.count` that would start; 0: none")]
    models_now: Annotated[list[str], Field(description="GPU models that would start")]
    max_share_now: Annotated[float | None, Field(description="the largest share; null: none, or whole GPUs")]
    without_same_numa: Annotated[bool, Field(description="whether omitting `same_numa` would help")]
    max_duration_s: Annotated[int | None, Field(description="the longest duration; null: none would start")]


class AheadItem(Answer):
    """A pending instance that is ahead in the queue. In other projects, ids and name are null."""

    instance_id: str | None
    group_id: str | None
    name: str | None
    because: Annotated[Because, Field(description="the first ordering rule that puts the instance ahead")]


class AwaitedEnd(Answer):
    instance_id: str
    name: str
    ends_at: Annotated[Timestamp | None, Field(description="the declared end, or the end of the stop")]


class Forecast(Answer):
    """The queue position and the predicted start, which follows from declared durations."""

    queue_position: int | None
    ahead: Annotated[list[AheadItem], Field(max_length=20, description="the first instances that are ahead")]
    starts_at: Annotated[Timestamp | None, Field(description="predicted start; null: unknown")]
    start_node_ids: list[str]
    waits_for: Annotated[list[AwaitedEnd], Field(description="your instances that must end first")]
    waits_for_others: Annotated[int, Field(description="instances of other projects that must end first")]
    would_fit: Annotated[Alternatives | None, Field(description="null: not pending, or nothing would start")]


class DryRun(Forecast):
    """Whether and where the instance could start now; if not, why not, and its predicted start."""

    placeable: bool
    node_id: str | None
    devices: list[Device]
    reason: Annotated[Reason | None, Field(description="why the instance would be pending; null: placeable")]
    refusals: list[RefusalItem]


class Explanation(Forecast):
    state: State
    reason: Reason | None
    node_id: str | None
    refusals: list[RefusalItem]


class WaitResult(Answer):
    reached: bool
    instance: Instance


class ExecBody(Body):
    command: Annotated[list[LongText], Field(min_length=1, max_length=1024)]
    timeout_s: Annotated[int, Field(ge=1, le=3600, description="seconds until the command is killed")] = 30


MAX_OUTPUT_BYTES = 1024 * 1024


class ExecResult(Answer):
    exit_code: int
    stdout: Annotated[str, Field(max_length=MAX_OUTPUT_BYTES)]
    stderr: Annotated[str, Field(max_length=MAX_OUTPUT_BYTES)]
    truncated: Annotated[bool, Field(description="whether output beyond 1 MiB was dropped")]


class MetricsList(Answer):
    items: list[Sample]


WaitState = Literal[
    "pending", "scheduled", "starting", "running", "stopping", "stopped", "succeeded", "failed", "deleted"
]
