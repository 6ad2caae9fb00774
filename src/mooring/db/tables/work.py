"""Instances and the GPUs that they hold."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Index,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from mooring.core.instance import DesiredState, State
from mooring.db.tables.base import Base, one_of
from mooring.db.types import BigId, JsonObject

ACTIVE = "state IN ('pending', 'scheduled', 'starting', 'running', 'stopping', 'unreachable')"


class Instance(Base):
    __tablename__ = "instances"
    __table_args__ = (
        one_of("state", State),
        one_of("desired_state", DesiredState),
        Index(
            "uq_instances_project_id_name",
            "project_id",
            "name",
            unique=True,
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
        # What the loops look for, each over the few rows that matter and not the whole history.
        Index(
            "ix_instances_pending",
            "queued_at",
            "id",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
        Index(
            "ix_instances_node",
            "node_id",
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index(
            "ix_instances_expires_at",
            "expires_at",
            sqlite_where=text("expires_at IS NOT NULL"),
            postgresql_where=text("expires_at IS NOT NULL"),
        ),
        # A project's page, without all that it ever had.
        Index(
            "ix_instances_project_id_id",
            "project_id",
            "id",
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
        # What a project holds and waits for, which is counted against its quotas.
        Index(
            "ix_instances_project_active",
            "project_id",
            sqlite_where=text(ACTIVE),
            postgresql_where=text(ACTIVE),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    labels: Mapped[JsonObject]
    spec: Mapped[JsonObject]
    gpu_count: Mapped[int]
    state: Mapped[State] = mapped_column()
    desired_state: Mapped[DesiredState] = mapped_column()
    reason: Mapped[JsonObject | None]
    version: Mapped[int]
    # Rises with every verb that changes what should run; `attempt` counts placements and restarts.
    generation: Mapped[int]
    attempt: Mapped[int]
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.id"))
    # The node's generation that first carried this attempt: older reports are silent about it.
    node_generation: Mapped[int] = mapped_column(BigInteger)
    cpu_milli: Mapped[int | None]
    memory_mib: Mapped[int | None]
    stop_timeout_s: Mapped[int]
    container_id: Mapped[str | None]
    image_digest: Mapped[str | None]
    exit_code: Mapped[int | None]
    endpoints: Mapped[list[Any]]
    simulated: Mapped[bool]
    max_duration_s: Mapped[int | None]
    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    scheduled_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class Allocation(Base):
    """One GPU held by one attempt from one moment to another: the lock and the ledger of usage in one."""

    __tablename__ = "allocations"
    __table_args__ = (
        # The promise that a GPU is never given twice, kept by the database and not by checks in code.
        Index(
            "uq_allocations_live_gpu",
            "gpu_uuid",
            unique=True,
            sqlite_where=text("to_at IS NULL"),
            postgresql_where=text("to_at IS NULL"),
        ),
        Index("ix_allocations_instance_id", "instance_id"),
        # The GPU-hours of a day or a month.
        Index("ix_allocations_project_id_to_at", "project_id", "to_at"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    instance_id: Mapped[str] = mapped_column(ForeignKey("instances.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    attempt: Mapped[int]
    from_at: Mapped[datetime]
    to_at: Mapped[datetime | None]
