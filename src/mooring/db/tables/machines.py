"""Nodes, their GPUs, join tokens, and requests for streams."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import LIVE, Base, one_of, partial_index
from mooring.db.types import JsonObject
from mooring_client.schemas.gpus import Health


class JoinToken(Base):
    """A one-time token for a machine to become a node. Only its hash is stored."""

    __tablename__ = "join_tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    secret_hash: Mapped[str] = mapped_column(unique=True)
    node_name: Mapped[str | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    node_id: Mapped[str | None]
    # Made by `mooring up` for its own node.
    local: Mapped[bool] = mapped_column(default=False, server_default=false())


class Node(Base):
    __tablename__ = "nodes"
    __table_args__ = (partial_index("uq_nodes_name", "name", where=LIVE, unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    credential_hash: Mapped[str] = mapped_column(unique=True)
    # A new credential that the node has fetched. Both are valid until its first use (security rule R20).
    next_credential_hash: Mapped[str | None] = mapped_column(unique=True)
    renewal_due: Mapped[bool] = mapped_column(default=False)
    cordoned: Mapped[bool] = mapped_column(default=False)
    draining: Mapped[bool] = mapped_column(default=False)
    # Ids of the projects whose instances may be placed here; null: all.
    reserved_for: Mapped[list[Any] | None]
    # Incremented by each change by an admin.
    version: Mapped[int] = mapped_column(default=1)
    drain_deadline_at: Mapped[datetime | None]
    silent: Mapped[bool] = mapped_column(default=True)
    problem: Mapped[JsonObject | None]
    # The effective facts: as reported, limited to what is approved (control/nodes/approval.py).
    facts: Mapped[JsonObject | None]
    # The approved facts, and those of GPUs by UUID under the key `gpus`; null until the first report.
    approved: Mapped[JsonObject | None]
    # Differences between the last report and what is approved; null: none.
    difference: Mapped[list[Any] | None]
    # Written by each report, read for metrics only.
    samples: Mapped[list[Any]] = mapped_column(default=list, deferred=True)
    orphans: Mapped[list[Any]] = mapped_column(default=list)
    # The newest agent's session and the `seq` of its last applied report; older sessions are rejected.
    session: Mapped[int] = mapped_column(default=0)
    seq: Mapped[int] = mapped_column(BigInteger, default=0)
    # Incremented by each change of the node's desired state. A report with a lower generation says nothing
    # about later changes. Begins with 1: an agent reports 0 until it has applied an answer.
    generation: Mapped[int] = mapped_column(BigInteger, default=1)
    # Incremented by each change that the scheduler sees: allocations, GPUs, facts, state.
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    # Counts reports. A node is silent if this does not change for some time on a monotonic clock; wall clocks
    # are not compared.
    heartbeats: Mapped[int] = mapped_column(BigInteger, default=0)
    last_heartbeat_at: Mapped[datetime | None]
    # Whether `mooring up` runs its agent.
    local: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Whether allocations with its id as `lost_node_id` may exist.
    has_lost_attempts: Mapped[bool] = mapped_column(default=False, server_default=false())
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Gpu(Base):
    """A GPU, identified by its NVML UUID, on exactly one node."""

    __tablename__ = "gpus"
    __table_args__ = (
        one_of("health", Health),
        CheckConstraint("milli_held BETWEEN 0 AND 1000", name="milli_held"),
    )

    uuid: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    index: Mapped[int]
    model: Mapped[str]
    memory_mib: Mapped[int]
    facts: Mapped[JsonObject]
    health: Mapped[Health] = mapped_column()
    health_reason: Mapped[JsonObject | None]
    # The project whose instance `health_reason` is about; null: none or several.
    reason_project_id: Mapped[str | None]
    # Ids of the newest applied incident and fault: the agent may report the same ones again.
    last_incident_id: Mapped[str | None]
    last_fault_id: Mapped[str | None]
    # The GPU has a warning, so it is used only if no other GPU fits.
    placed_last: Mapped[bool] = mapped_column(default=False, server_default=false())
    simulated: Mapped[bool]
    # Written only by the triggers on `allocations`. `held_by` is the project; null: none, or MIG devices.
    milli_held: Mapped[int] = mapped_column(default=0)
    held_by: Mapped[str | None]


class GpuCondition(Base):
    """A current problem of a GPU. `project_id` is set for application faults, otherwise empty."""

    __tablename__ = "gpu_conditions"

    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"), primary_key=True)
    code: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    severity: Mapped[str]
    action: Mapped[str]
    since: Mapped[datetime]
    last_at: Mapped[datetime] = mapped_column(index=True)
    count: Mapped[int]
    # Whether the condition ends only when the node no longer lists it.
    standing: Mapped[bool]


class GpuIncident(Base):
    """An incident of a GPU. Equal incidents within an hour are one row; only the newest are kept."""

    __tablename__ = "gpu_incidents"
    __table_args__ = (Index("ix_gpu_incidents_gpu_uuid_id", "gpu_uuid", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    node_id: Mapped[str]
    code: Mapped[str]
    severity: Mapped[str]
    action: Mapped[str]
    message: Mapped[str]
    # The project and instance that had the GPU then; null: none or several.
    project_id: Mapped[str | None]
    instance_id: Mapped[str | None]
    since: Mapped[datetime]
    last_at: Mapped[datetime]
    count: Mapped[int]


class Stream(Base):
    """An open stream, or a request for one to which the node has not connected yet."""

    __tablename__ = "streams"

    id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    # Empty once the node has connected.
    request: Mapped[JsonObject]
    is_connected: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime]
    # When the process that serves it last said so.
    seen_at: Mapped[datetime]
    # The row of the audit log that is written at its end, without the outcome; null: none is written.
    audit: Mapped[JsonObject | None]
