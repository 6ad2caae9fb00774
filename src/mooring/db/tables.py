"""The tables. What SQL must filter, join, sum or constrain is a column; what only a reader shows is JSON."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from mooring.core.gpu import Health
from mooring.core.instance import DesiredState, State
from mooring.db.types import BigId, Json, JsonObject, UtcDateTime, Word

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {
        datetime: UtcDateTime,
        JsonObject: Json,
        list[Any]: Json,
        State: Word(State),
        DesiredState: Word(DesiredState),
        Health: Word(Health),
    }


def one_of(column: str, values: type[State] | type[DesiredState] | type[Health]) -> CheckConstraint:
    """A check that holds an enumeration in the database itself, whoever writes."""
    return CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=column)


class ControlPlane(Base):
    """One row: who this control plane is, to its nodes and to the cursors it signs."""

    __tablename__ = "control_plane"

    id: Mapped[str] = mapped_column(primary_key=True)
    cursor_secret: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]


class Project(Base):
    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    scopes: Mapped[list[Any]]
    secret_hash: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


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
    __table_args__ = (
        Index(
            "uq_nodes_name",
            "name",
            unique=True,
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    credential_hash: Mapped[str] = mapped_column(unique=True)
    cordoned: Mapped[bool] = mapped_column(default=False)
    draining: Mapped[bool] = mapped_column(default=False)
    drain_deadline_at: Mapped[datetime | None]
    silent: Mapped[bool] = mapped_column(default=True)
    problem: Mapped[JsonObject | None]
    facts: Mapped[JsonObject | None]
    # Written with every report and read only for figures.
    samples: Mapped[list[Any]] = mapped_column(default=list, deferred=True)
    orphans: Mapped[list[Any]] = mapped_column(default=list)
    # The newest agent's session and its last applied report: older ones are refused or skipped.
    session: Mapped[int] = mapped_column(default=0)
    seq: Mapped[int] = mapped_column(BigInteger, default=0)
    # Rises with every change of what the node should have; a report made under a lower one is silent
    # about what came after.
    generation: Mapped[int] = mapped_column(BigInteger, default=0)
    # Counts reports. Silence is measured by how long this stands still on a monotonic clock, never by
    # comparing wall clocks.
    heartbeats: Mapped[int] = mapped_column(BigInteger, default=0)
    last_heartbeat_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Gpu(Base):
    """A card, known by its NVML UUID, on exactly one node."""

    __tablename__ = "gpus"
    __table_args__ = (one_of("health", Health),)

    uuid: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    index: Mapped[int]
    model: Mapped[str]
    memory_mib: Mapped[int]
    facts: Mapped[JsonObject]
    health: Mapped[Health] = mapped_column()
    health_reason: Mapped[JsonObject | None]
    last_incident_id: Mapped[str | None]
    simulated: Mapped[bool]


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
        Index("ix_instances_project_id_id", "project_id", "id"),
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
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    instance_id: Mapped[str] = mapped_column(ForeignKey("instances.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    attempt: Mapped[int]
    from_at: Mapped[datetime]
    to_at: Mapped[datetime | None]


class Event(Base):
    """The history, append-only. `seq` is the order of commits (see control/events.py)."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_instance_id_seq", "instance_id", "seq"),
        # SQLite would otherwise give the number of a deleted last row to the next one.
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str]
    type: Mapped[str]
    project_id: Mapped[str | None]
    instance_id: Mapped[str | None]
    at: Mapped[datetime]
    data: Mapped[JsonObject]


class IdempotencyKey(Base):
    """The stored answer of a POST, written in the transaction of its effect. No status: still running."""

    __tablename__ = "idempotency_keys"

    caller: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    status: Mapped[int | None]
    headers: Mapped[JsonObject | None]
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(index=True)


class Stream(Base):
    """Logs or an exec that a user waits for and a node has not dialled in for yet."""

    __tablename__ = "streams"

    id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    request: Mapped[JsonObject]
    created_at: Mapped[datetime]
