"""Schemas of the queue and of fragmentation."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mooring.core.instance.state import Reason
from mooring.schemas.base import Answer, Json, Timestamp

Because = Literal["priority", "overdue", "guarantee", "promised", "fair_share", "age"]
Stranding = Literal[
    "node_cordoned", "node_draining", "node_not_ready", "node_unreachable", "quarantined", "reserved",
    "disk_pressure", "shared_rest", "no_cpu_left", "no_memory_left", "no_disk_left",
]  # fmt: skip

QUEUE_EXAMPLE: Json = {
    "items": [
        {
            "position": 1,
            "instance_id": "ins_01m7ytn7kexrn34wn367q44k9v",
            "group_id": None,
            "name": "train-1",
            "project_id": "prj_01m7ytkz3cq1f7r8v2w9x4a6bd",
            "count": 1,
            "gpus": 8.0,
            "priority": 50,
            "waits_since": "2026-11-21T08:00:00.000Z",
            "reason": {
                "code": "waiting_for_capacity",
                "message": "no node has 8 free H100 (best: 4 on gpu-7)",
            },
            "behind": None,
            "starts_at": "2026-11-21T12:00:30.000Z",
            "node_ids": ["nod_01m7ytm2d5e8g0h3j6k9m1n4pq"],
        },
        {
            "position": 2,
            "instance_id": None,
            "group_id": None,
            "name": None,
            "project_id": None,
            "count": 4,
            "gpus": 32.0,
            "priority": 50,
            "waits_since": "2026-11-21T07:00:00.000Z",
            "reason": None,
            "behind": "fair_share",
            "starts_at": None,
            "node_ids": [],
        },
    ],
    "next_cursor": None,
    "shares": [
        {
            "project_id": "prj_01m7ytkz3cq1f7r8v2w9x4a6bd",
            "weight": 1.0,
            "guaranteed_gpus": None,
            "gpus": 4.0,
            "gpu_hours_of_late": 31.5,
            "dominant_share": 0.0625,
        }
    ],
}


class QueueEntry(Answer):
    """A pending instance or group. Entries of other projects have no ids or names."""

    position: Annotated[int, Field(description="position of its first member over all projects, from 1")]
    instance_id: Annotated[str | None, Field(description="null: a group, or of another project")]
    group_id: Annotated[str | None, Field(description="null: no group, or of another project")]
    name: str | None
    project_id: Annotated[str | None, Field(description="null: another project")]
    count: Annotated[int, Field(description="number of pending instances: group members, or 1")]
    gpus: Annotated[float, Field(description="requested GPUs of all of them, shares included")]
    priority: int
    waits_since: Timestamp
    reason: Annotated[Reason | None, Field(description="null: not known yet, or of another project")]
    behind: Annotated[Because | None, Field(description="why the previous entry is ahead; null: it is first")]
    starts_at: Annotated[Timestamp | None, Field(description="start of its backfill slot; null: none")]
    node_ids: Annotated[list[str], Field(description="nodes of its backfill slot")]


class ProjectShare(Answer):
    """A project's share. The project with the smallest dominant share comes first."""

    project_id: str
    weight: float
    guaranteed_gpus: int | None
    gpus: Annotated[float, Field(description="GPUs that it uses now")]
    gpu_hours_of_late: Annotated[float, Field(description="recent GPU-hours; each half-life halves them")]
    dominant_share: Annotated[
        float, Field(description="largest share of all GPUs, CPUs or memory, now and recently, per weight")
    ]


class Queue(Answer):
    """The queue in scheduling order."""

    model_config = ConfigDict(json_schema_extra={"examples": [QUEUE_EXAMPLE]})

    items: Annotated[list[QueueEntry], Field(max_length=200)]
    next_cursor: str | None
    shares: Annotated[list[ProjectShare], Field(description="shares of your projects; admins see all")]


class SizeThatFits(Answer):
    count: Annotated[int, Field(description="whole GPUs per instance")]
    instances: Annotated[int, Field(description="how many such instances could start now")]


class ShareThatFits(Answer):
    share: float
    instances: int


class StrandedGpus(Answer):
    by: Stranding
    gpus: Annotated[float, Field(description="free GPUs that this reason makes unusable")]


class FreeMigDevices(Answer):
    mig_profile: str
    free: int


class ModelFragmentation(Answer):
    """The GPUs of one model. Those with MIG enabled count only in `mig`."""

    model: str
    gpus: int
    gpus_free: Annotated[int, Field(description="GPUs without any allocation")]
    share_free: Annotated[float, Field(description="free GPUs plus the free parts of shared ones")]
    fits: list[SizeThatFits]
    shares_fit: list[ShareThatFits]
    stranded: list[StrandedGpus]
    mig: list[FreeMigDevices]


FRAGMENTATION_EXAMPLE: Json = {
    "items": [
        {
            "model": "NVIDIA H100 80GB HBM3",
            "gpus": 16,
            "gpus_free": 7,
            "share_free": 7.5,
            "fits": [
                {"count": 1, "instances": 6},
                {"count": 2, "instances": 3},
                {"count": 4, "instances": 1},
                {"count": 8, "instances": 0},
            ],
            "shares_fit": [{"share": 0.25, "instances": 24}, {"share": 0.5, "instances": 12}],
            "stranded": [{"by": "quarantined", "gpus": 1.0}, {"by": "shared_rest", "gpus": 0.5}],
            "mig": [],
        }
    ],
    "next_cursor": None,
}


class Fragmentation(Answer):
    model_config = ConfigDict(json_schema_extra={"examples": [FRAGMENTATION_EXAMPLE]})

    items: list[ModelFragmentation]
    next_cursor: None
