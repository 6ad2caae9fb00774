"""Instances, instance groups, GPU allocations and reservations."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    false,
    func,
)
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import DELETED, LIVE, Base, one_of, partial_index
from mooring.db.types import BigId, JsonObject
from mooring_client.schemas.states import DesiredState, State

ACTIVE = "state IN ('pending', 'scheduled', 'starting', 'running', 'stopping', 'unreachable')"


class Instance(Base):
    __tablename__ = "instances"
    __table_args__ = (
        one_of("state", State),
        one_of("desired_state", DesiredState),
        partial_index("uq_instances_project_id_name", "project_id", "name", where=LIVE, unique=True),
        # For the loops: indexes of the few rows that matter, not of all history.
        partial_index("ix_instances_pending", "queued_at", "id", where="state = 'pending'"),
        partial_index("ix_instances_node", "node_id", where=LIVE),
        partial_index("ix_instances_expires_at", "expires_at", where="expires_at IS NOT NULL"),
        # For the list of a project's instances, without deleted ones.
        partial_index("ix_instances_project_id_id", "project_id", "id", where=LIVE),
        # For quotas: a project's active and pending instances.
        partial_index("ix_instances_project_active", "project_id", where=ACTIVE),
        # For retention.
        partial_index("ix_instances_deleted_at", "deleted_at", where=DELETED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    labels: Mapped[JsonObject]
    spec: Mapped[JsonObject]
    # Number of GPUs or MIG devices, and their total in thousandths of a GPU.
    gpu_count: Mapped[int]
    gpu_milli: Mapped[int]
    priority: Mapped[int]
    group_id: Mapped[str | None] = mapped_column(ForeignKey("instance_groups.id"), index=True)
    # From 0.
    group_rank: Mapped[int | None]
    state: Mapped[State] = mapped_column()
    desired_state: Mapped[DesiredState] = mapped_column()
    reason: Mapped[JsonObject | None]
    version: Mapped[int]
    # Incremented by each operation that changes the desired state; `attempt` counts placements and restarts.
    generation: Mapped[int]
    attempt: Mapped[int]
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.id"))
    # The node's generation that first had this attempt; older reports say nothing about it.
    node_generation: Mapped[int] = mapped_column(BigInteger)
    cpu_milli: Mapped[int | None]
    memory_mib: Mapped[int | None]
    disk_mib: Mapped[int | None]
    # How the instance was placed: see `Granted` in schemas/instances.py.
    placed_as: Mapped[JsonObject | None]
    # Whether the instance was preempted and is queued again when its container is gone.
    requeue: Mapped[bool] = mapped_column(default=False)
    # How often the node fetched the secrets and registry credentials of an attempt.
    handout_attempt: Mapped[int | None]
    handout_count: Mapped[int] = mapped_column(default=0)
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
    # The `expires_at` that an event has announced.
    expiry_announced: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]

    @hybrid_property
    def preemptible(self) -> bool:
        """As in the spec; false if an earlier release, which did not have the field, stored the spec."""
        return bool(self.spec.get("preemptible"))

    @preemptible.inplace.expression
    @classmethod
    def _preemptible(cls) -> ColumnElement[bool]:
        return func.coalesce(cls.spec["preemptible"].as_boolean(), false())

    @hybrid_property
    def replaced_on_loss(self) -> bool:
        """Whether it continues on another node when its node is lost."""
        return self.spec.get("on_node_loss") == "replace"

    @replaced_on_loss.inplace.expression
    @classmethod
    def _replaced_on_loss(cls) -> ColumnElement[bool]:
        return func.coalesce(cls.spec["on_node_loss"].as_string() == "replace", false())


class DockerContainer(Base):
    """What a Docker client created. It has no instance until it is started."""

    __tablename__ = "docker_containers"
    __table_args__ = (Index("uq_docker_containers_project_id_name", "project_id", "name", unique=True),)

    # 64 hexadecimal digits.
    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"))
    caller_id: Mapped[str]
    name: Mapped[str]
    # What the client sees of it.
    config: Mapped[JsonObject]
    # The body of the request that creates the instance.
    request: Mapped[JsonObject]
    # Delete the instance when it has ended.
    auto_remove: Mapped[bool]
    # No foreign key: the instance may be purged first.
    instance_id: Mapped[str | None] = mapped_column(index=True)
    created_at: Mapped[datetime]


class Allocation(Base):
    """What one attempt has of one GPU, from placement to release. The table is also the ledger of usage.

    Triggers update `gpus.milli_held` and `gpus.held_by` from the rows without an end. They and the check
    constraint on `milli_held` prevent allocating a GPU twice.
    """

    __tablename__ = "allocations"
    __table_args__ = (
        partial_index(
            "uq_allocations_live_mig", "mig_uuid", where="to_at IS NULL AND mig_uuid IS NOT NULL", unique=True
        ),
        partial_index("ix_allocations_live_gpu", "gpu_uuid", where="to_at IS NULL"),
        partial_index(
            "ix_allocations_lost_node_id", "lost_node_id", where="to_at IS NULL AND lost_node_id IS NOT NULL"
        ),
        Index("ix_allocations_instance_id", "instance_id"),
        # For the GPU-hours of a day or a month.
        Index("ix_allocations_project_id_to_at", "project_id", "to_at"),
        CheckConstraint("milli BETWEEN 1 AND 1000", name="milli"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    gpu_uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    # No foreign key: the ledger outlives the instance's row (see InstanceRecord).
    instance_id: Mapped[str]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    attempt: Mapped[int]
    # Thousandths of the GPU; for a MIG device, its size as in `mig_milli` of schemas/gpus.py.
    milli: Mapped[int]
    mig_uuid: Mapped[str | None]
    from_at: Mapped[datetime]
    to_at: Mapped[datetime | None]
    # Set if the node was lost and the instance continues elsewhere: the GPU stays allocated until the node
    # has reported that the attempt's container is gone. Not usage of the project.
    lost_node_id: Mapped[str | None]


class InstanceGroup(Base):
    """Instances that are placed all together or not at all, and reach each other by name."""

    __tablename__ = "instance_groups"
    __table_args__ = (
        partial_index("uq_instance_groups_project_id_name", "project_id", "name", where=LIVE, unique=True),
        Index("ix_instance_groups_project_id_id", "project_id", "id"),
        partial_index("ix_instance_groups_deleted_at", "deleted_at", where=DELETED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    labels: Mapped[JsonObject]
    count: Mapped[int]
    template: Mapped[JsonObject]
    on_member_failure: Mapped[str]
    # How members on several nodes reach each other: auto, overlay or host.
    network: Mapped[str]
    encrypted: Mapped[bool]
    master_port: Mapped[int]
    # How often failed members were queued again since the group was last started.
    restarts: Mapped[int]
    desired_state: Mapped[DesiredState] = mapped_column()
    reason: Mapped[JsonObject | None]
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class InstanceRecord(Base):
    """The record of a purged instance that was placed at least once.

    With its rows in `allocations`, which are kept too, it shows which GPUs a project had, and when.
    """

    __tablename__ = "instance_records"
    __table_args__ = (Index("ix_instance_records_project_id_id", "project_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    group_id: Mapped[str | None]
    gpu_count: Mapped[int]
    gpu_milli: Mapped[int]
    cpu_milli: Mapped[int | None]
    memory_mib: Mapped[int | None]
    preemptible: Mapped[bool]
    attempts: Mapped[int]
    created_at: Mapped[datetime]
    # Of the last attempt.
    scheduled_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class ProjectStorage(Base):
    """How many bytes of the database a project uses; see `control/tenants/storage.py`.

    A project's counts are the sums over its stripes.
    """

    __tablename__ = "project_storage"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    stripe: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # Specs and labels of its instances and groups, until they are purged. A stripe may be negative.
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
    # Bytes written on the UTC day `written_on`, such as 2026-11-22.
    written_bytes: Mapped[int] = mapped_column(BigInteger)
    written_on: Mapped[str]


class Reservation(Base):
    """GPUs reserved for a project from a start to an end time."""

    __tablename__ = "reservations"
    __table_args__ = (
        partial_index("ix_reservations_to_at", "to_at", where=LIVE),
        Index("ix_reservations_project_id_id", "project_id", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    # The request, as in schemas/reservations.py.
    asked: Mapped[JsonObject]
    # The chosen GPUs; unhealthy ones are replaced.
    gpu_uuids: Mapped[list[Any]]
    from_at: Mapped[datetime]
    to_at: Mapped[datetime]
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class ProjectUsage(Base):
    """Recent usage of a project, which decays with a half-life: the basis of fair share."""

    __tablename__ = "project_usages"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    gpu_s: Mapped[float] = mapped_column(Float)
    cpu_s: Mapped[float] = mapped_column(Float)
    memory_mib_s: Mapped[float] = mapped_column(Float)
    as_of: Mapped[datetime]
