"""Schemas of the queue and of fragmentation."""

from typing import Annotated, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer, Timestamp
from mooring_client.schemas.states import Reason

Because = Literal["priority", "overdue", "guarantee", "promised", "fair_share", "age"]
Stranding = Literal[
    "node_cordoned", "node_draining", "node_not_ready", "node_unreachable", "quarantined", "reserved",
    "disk_pressure", "shared_rest", "no_cpu_left", "no_memory_left", "no_disk_left",
]  # fmt: skip


class QueueEntry(Answer):
    """A pending instance or group. Entries of other projects have no ids or names."""

    position: Annotated[int, Field(description="position of its first member over all projects, from 1")]
    instance_id: Annotated[str | None, Field(description="null: a group, or of another project")]
    group_id: Annotated[str | None, Field(description="null: no group, or of another project")]
    name: str | None
    project_id: Annotated[str | None, Field(description="null: another project")]
    count: Annotated[int, Field(description="number of pending instances: group members, or 1")]
    gpus: Annotated[float, Field(description="requested GPUs of all these instances, shares included")]
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
    gpus: Annotated[float, Field(description="free GPUs that are unusable for this reason")]


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


class Fragmentation(Answer):
    items: list[ModelFragmentation]
    next_cursor: None
