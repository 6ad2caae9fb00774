"""Volumes, the instances that mount them, and the nodes that have them."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import LIVE, Base, partial_index
from mooring.db.types import JsonObject


class Volume(Base):
    """A volume of a project. A deleted one is kept until all its nodes have confirmed that it is gone."""

    __tablename__ = "volumes"
    __table_args__ = (
        partial_index("uq_volumes_project_id_name", "project_id", "name", where=LIVE, unique=True),
        Index("ix_volumes_project_id_id", "project_id", "id"),
        CheckConstraint("driver IN ('local', 'nfs', 'cache')", name="driver"),
        CheckConstraint("driver = 'local' OR node_id IS NULL", name="node_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    labels: Mapped[JsonObject]
    driver: Mapped[str]
    # Null: nfs.
    size_mib: Mapped[int | None] = mapped_column(BigInteger)
    # As VolumeOptions in schemas/volumes.py, without nulls.
    options: Mapped[JsonObject]
    node_selector: Mapped[JsonObject]
    # Of a local volume: where the first instance that mounts it was placed. Written with that placement.
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.id"), index=True)
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class InstanceVolume(Base):
    """A mount of an instance's spec, with the volume that its name stood for when it was created."""

    __tablename__ = "instance_volumes"
    __table_args__ = (Index("ix_instance_volumes_volume_id", "volume_id"),)

    instance_id: Mapped[str] = mapped_column(ForeignKey("instances.id", ondelete="CASCADE"), primary_key=True)
    # In the order of the spec, from 0.
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    volume_id: Mapped[str] = mapped_column(ForeignKey("volumes.id", ondelete="CASCADE"))
    path: Mapped[str]
    read_only: Mapped[bool]


class NodeVolume(Base):
    """A node that has a volume, or is to have it. Deleted once the node reports that it is gone."""

    __tablename__ = "node_volumes"
    __table_args__ = (Index("ix_node_volumes_node_id", "node_id"),)

    volume_id: Mapped[str] = mapped_column(ForeignKey("volumes.id", ondelete="CASCADE"), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    # The node's generation that had its newest change; older reports say nothing about it.
    node_generation: Mapped[int] = mapped_column(BigInteger)
    # As the node reported; null: nothing yet.
    used_mib: Mapped[int | None] = mapped_column(BigInteger)
    size_enforced: Mapped[bool | None]
