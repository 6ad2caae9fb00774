"""Instances on the wire."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from mooring.core.gpu import Sample
from mooring.core.instance.spec import (
    DEFAULT_PRIORITY,
    InstanceRequest,
    InstanceSpec,
    require_no_reserved_labels,
)
from mooring.core.instance.state import DesiredState, Reason, State
from mooring.core.text import LabelKey, LabelValue, LongText, Name
from mooring.schemas.agent import Endpoint
from mooring.schemas.base import Answer, Body, Json, Timestamp
from mooring.schemas.queue import Because

# exclusive: the whole card. mig: a MIG device. mps: the driver's MPS daemon holds it to its memory and SMs.
# shared: the agent's watchdog stops what takes more memory than its share; nothing limits SMs.
Isolation = Literal["exclusive", "mig", "mps", "shared"]

CREATE_EXAMPLE: Json = {
    "name": "train-1",
    "image": "pytorch/pytorch:2.8.0-cuda12.9-cudnn9-runtime",
    "command": ["python", "train.py"],
    "env": {"EPOCHS": "10"},
    "gpus": {"count": 2, "model": "H100", "min_memory_mib": 40000},
    "cpus": 8,
    "memory_mib": 65536,
    "shm_mib": 8192,
    "disk_mib": 102400,
    "ports": [{"container": 8888, "protocol": "tcp"}],
    "labels": {"team": "vision"},
    "max_duration_s": 86400,
    "node_selector": {"zone": "a"},
}


INSTANCE_EXAMPLE: Json = {
    **CREATE_EXAMPLE,
    "id": "ins_01m7ytn7kexrn34wn367q44k9v",
    "project_id": "prj_01m7ytkz3cq1f7r8v2w9x4a6bd",
    "state": "running",
    "desired_state": "running",
    "reason": None,
    "version": 5,
    "generation": 1,
    "attempt": 1,
    "node_id": "nod_01m7ytm2d5e8g0h3j6k9m1n4pq",
    "node_name": "gpu-7",
    "group_id": None,
    "group_rank": None,
    "granted": {
        "cpus": 8,
        "memory_mib": 65536,
        "disk_mib": 102400,
        "isolation": "exclusive",
        "link_score": 1.0,
        "borrowed": False,
    },
    "devices": [
        {
            "uuid": f"GPU-e13a6c75-b0f2-5f46-b758-cf8891cf4ff{index}",
            "index": index,
            "model": "NVIDIA H100 80GB HBM3",
            "memory_mib": 81559,
            "share": 1.0,
            "mig_uuid": None,
        }
        for index in (0, 1)
    ],
    "endpoints": [{"container": 8888, "protocol": "tcp", "host": "10.0.0.7", "port": 32768}],
    "container_id": "4f3c2a",
    "image_digest": f"sha256:{'0123456789abcdef' * 4}",
    "exit_code": None,
    "queue_position": None,
    "actions": ["stop", "restart", "delete"],
    "simulated": False,
    "created_at": "2026-11-21T08:00:00.000Z",
    "scheduled_at": "2026-11-21T08:00:00.020Z",
    "started_at": "2026-11-21T08:00:00.300Z",
    "stopped_at": None,
    "expires_at": "2026-11-22T08:00:00.300Z",
}


class InstanceCreate(InstanceRequest):
    """What to run. Only `image` is required; without `gpus` the container sees none."""

    model_config = ConfigDict(json_schema_extra={"examples": [CREATE_EXAMPLE, {"image": "busybox:1.36"}]})


class InstancePatch(Body):
    """The fields to change; those left out stay as they are."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"labels": {"team": "speech"}}]})

    # Only what was sent is read, so the defaults never are; null is no name and no set of labels.
    name: Annotated[Name, Field(default_factory=str)]
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    max_duration_s: Annotated[int | None, Field(ge=1, le=10 * 366 * 86_400)] = None
    priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY

    @field_validator("labels")
    @classmethod
    def _no_reserved_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        return require_no_reserved_labels(labels)


class InstanceStop(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"timeout_s": 10}]})

    timeout_s: Annotated[int, Field(ge=0, le=3600, description="between SIGTERM and SIGKILL")] = 10


class Device(Answer):
    uuid: str
    index: int
    model: str
    memory_mib: int
    share: Annotated[float, Field(description="the part of it that the instance has; 1: all of it")]
    mig_uuid: Annotated[str | None, Field(description="the MIG device on it that the instance has")]


class Granted(Answer):
    """What the placement gives: what was asked for, or the share that goes with its GPUs."""

    cpus: float
    memory_mib: int
    disk_mib: Annotated[int | None, Field(description="null: placed by an earlier release, without a limit")]
    isolation: Annotated[
        Isolation | None,
        Field(description="what keeps other instances off its GPUs; null without GPUs"),
    ]
    link_score: Annotated[
        float | None,
        Field(description="of several GPUs: 1 where the node has no better connected set of that size"),
    ]
    borrowed: Annotated[
        bool, Field(description="beyond what its project is guaranteed: others may take it back")
    ]


class Instance(InstanceSpec):
    """An instance: every field of its request, and what became of it."""

    model_config = ConfigDict(
        extra="ignore", strict=False, json_schema_extra={"examples": [INSTANCE_EXAMPLE]}
    )

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
    endpoints: list[Endpoint]
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
    """What would start now in its place, everything else being the same."""

    max_count_now: Annotated[int, Field(description="the largest number of such GPUs; 0: not even one")]
    models_now: Annotated[list[str], Field(description="models that could be asked for")]
    max_share_now: Annotated[
        float | None, Field(description="the largest share of one GPU; null: none, or no share is asked for")
    ]
    without_same_numa: Annotated[bool, Field(description="it would start without `same_numa`")]
    max_duration_s: Annotated[
        int | None,
        Field(description="with this `max_duration_s` it would start, as it would end before others' turn"),
    ]


class AheadItem(Answer):
    """One that comes before it; another project's is not named."""

    instance_id: str | None
    group_id: str | None
    name: str | None
    because: Annotated[Because, Field(description="the first rule of the queue by which it does")]


class AwaitedEnd(Answer):
    instance_id: str
    name: str
    ends_at: Annotated[Timestamp | None, Field(description="as it declared, or as it is being stopped")]


class Outlook(Answer):
    """Where it stands, and when it will start as far as declared durations tell."""

    queue_position: int | None
    ahead: Annotated[
        list[AheadItem], Field(max_length=20, description="the first of those that come before it")
    ]
    starts_at: Annotated[
        Timestamp | None,
        Field(description="null: something without a declared end, or nobody knows what, is in the way"),
    ]
    start_node_ids: list[str]
    waits_for: Annotated[
        list[AwaitedEnd], Field(description="your instances that must end first: what starts_at is based on")
    ]
    waits_for_others: Annotated[int, Field(description="other projects' that must end first")]
    would_fit: Annotated[
        Alternatives | None, Field(description="null: it does not wait, or nothing else would start now")
    ]


class DryRun(Outlook):
    """Whether it could start right now and where; if not, why not, and what it would wait for."""

    placeable: bool
    node_id: str | None
    devices: list[Device]
    reason: Annotated[Reason | None, Field(description="that it would wait with")]
    refusals: list[RefusalItem]


class Explanation(Outlook):
    state: State
    reason: Reason | None
    node_id: str | None
    refusals: list[RefusalItem]


class WaitResult(Answer):
    reached: bool
    instance: Instance


class ExecBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"command": ["nvidia-smi"], "timeout_s": 30}]})

    command: Annotated[list[LongText], Field(min_length=1, max_length=1024)]
    timeout_s: Annotated[int, Field(ge=1, le=3600)] = 30


MAX_OUTPUT_BYTES = 1024 * 1024


class ExecResult(Answer):
    exit_code: int
    stdout: Annotated[str, Field(max_length=MAX_OUTPUT_BYTES)]
    stderr: Annotated[str, Field(max_length=MAX_OUTPUT_BYTES)]
    truncated: Annotated[bool, Field(description="more than 1 MiB was printed and the rest is left out")]


class MetricsList(Answer):
    items: list[Sample]


WaitState = Literal[
    "pending", "scheduled", "starting", "running", "stopping", "stopped", "succeeded", "failed", "deleted"
]
