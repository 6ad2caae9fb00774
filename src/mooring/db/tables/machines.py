"""Nodes, their GPUs, and the tokens that machines join with."""

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

from mooring.core.gpu import Health
from mooring.db.tables.base import LIVE, Base, one_of, partial_index
from mooring.db.types import JsonObject


class JoinToken(Base):
    """A token that a machine becomes a node with, once. Only its hash is kept."""

    __tablename__ = "join_tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    secret_hash: Mapped[str] = mapped_column(unique=True)
    node_name: Mapped[str | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    node_id: Mapped[str | None]


class Node(Base):
    __tablename__ = "nodes"
    __table_args__ = (partial_index("uq_nodes_name", "name", where=LIVE, unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    credential_hash: Mapped[str] = mapped_column(unique=True)
    # The one that the node has fetched and not used yet: both are good until it does (R20).
    next_credential_hash: Mapped[str | None] = mapped_column(unique=True)
    renewal_due: Mapped[bool] = mapped_column(default=False)
    cordoned: Mapped[bool] = mapped_column(default=False)
    draining: Mapped[bool] = mapped_column(default=False)
    # Ids of the only projects whose instances may be placed here; null: all.
    reserved_for: Mapped[list[Any] | None]
    # Rises with every change that an admin makes.
    version: Mapped[int] = mapped_column(default=1)
    drain_deadline_at: Mapped[datetime | None]
    silent: Mapped[bool] = mapped_column(default=True)
    problem: Mapped[JsonObject | None]
    # The facts in effect: what the node reports, within what is approved (control/nodes/approval.py).
    facts: Mapped[JsonObject | None]
    # Null until the first report; with the GPUs by UUID under `gpus`.
    approved: Mapped[JsonObject | None]
    # Where the last report differs from what is approved; null: nowhere.
    difference: Mapped[list[Any] | None]
    # Written with every report and read only for figures.
    samples: Mapped[list[Any]] = mapped_column(default=list, deferred=True)
    orphans: Mapped[list[Any]] = mapped_column(default=list)
    # The newest agent's session and its last applied report: older ones are refused or skipped.
    session: Mapped[int] = mapped_column(default=0)
    seq: Mapped[int] = mapped_column(BigInteger, default=0)
    # Rises with every change of what the node should have; a report made under a lower one is silent
    # about what came after.
    generation: Mapped[int] = mapped_column(BigInteger, default=0)
    # Rises with every change that the scheduler would see: what is held there, cards, facts, state.
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    # Counts reports. Silence is measured by how long this stands still on a monotonic clock, never by
    # comparing wall clocks.
    heartbeats: Mapped[int] = mapped_column(BigInteger, default=0)
    last_heartbeat_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Gpu(Base):
    """A card, known by its NVML UUID, on exactly one node."""

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
    # Whose instance `health_reason` is about; null: of no single project.
    reason_project_id: Mapped[str | None]
    last_incident_id: Mapped[str | None]
    last_fault_id: Mapped[str | None]
    # It has a warning: it is given out where nothing else fits.
    placed_last: Mapped[bool] = mapped_column(default=False, server_default=false())
    simulated: Mapped[bool]
    # Both are written by the triggers on `allocations` alone. No project: nothing or MIG devices are held.
    milli_held: Mapped[int] = mapped_column(default=0)
    held_by: Mapped[str | None]


class GpuCondition(Base):
    """What is wrong with a GPU now. `project_id`: of an application fault, else empty."""

    __tablename__ = "gpu_conditions"

    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"), primary_key=True)
    code: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    severity: Mapped[str]
    action: Mapped[str]
    since: Mapped[datetime]
    last_at: Mapped[datetime] = mapped_column(index=True)
    count: Mapped[int]
    # It ends when the node no longer lists it, and not before.
    standing: Mapped[bool]


class GpuIncident(Base):
    """Something that happened to a GPU, equal ones of an hour counted as one; the newest are kept."""

    __tablename__ = "gpu_incidents"
    __table_args__ = (Index("ix_gpu_incidents_gpu_uuid_id", "gpu_uuid", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    node_id: Mapped[str]
    code: Mapped[str]
    severity: Mapped[str]
    action: Mapped[str]
    message: Mapped[str]
    # Who had it then; null: nobody, or several.
    project_id: Mapped[str | None]
    instance_id: Mapped[str | None]
    since: Mapped[datetime]
    last_at: Mapped[datetime]
    count: Mapped[int]


class Stream(Base):
    """Logs or an exec that a user waits for and a node has not dialled in for yet."""

    __tablename__ = "streams"

    id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    request: Mapped[JsonObject]
    created_at: Mapped[datetime]
