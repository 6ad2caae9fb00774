"""Volumes."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0024"
down_revision: str | None = "0023"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    _create_volumes()
    _create_mounts()
    op.create_table(
        "node_volumes",
        sa.Column("volume_id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("node_generation", sa.BigInteger(), nullable=False),
        sa.Column("used_mib", sa.BigInteger(), nullable=True),
        sa.Column("size_enforced", sa.Boolean(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_volumes_node_id")),
        sa.ForeignKeyConstraint(
            ["volume_id"], ["volumes.id"], name=op.f("fk_node_volumes_volume_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("volume_id", "node_id", name=op.f("pk_node_volumes")),
    )
    op.create_index("ix_node_volumes_node_id", "node_volumes", ["node_id"])


def _create_volumes() -> None:
    op.create_table(
        "volumes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("size_mib", sa.BigInteger(), nullable=True),
        sa.Column("options", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("node_selector", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("driver IN ('local', 'nfs', 'cache')", name=op.f("ck_volumes_driver")),
        sa.CheckConstraint("driver = 'local' OR node_id IS NULL", name=op.f("ck_volumes_node_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_volumes_node_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_volumes_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_volumes")),
    )
    op.create_index("ix_volumes_project_id_id", "volumes", ["project_id", "id"])
    op.create_index("ix_volumes_node_id", "volumes", ["node_id"])
    live = sa.text("deleted_at IS NULL")
    op.create_index(
        "uq_volumes_project_id_name",
        "volumes",
        ["project_id", "name"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )


def _create_mounts() -> None:
    op.create_table(
        "instance_volumes",
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("volume_id", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("read_only", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["instance_id"],
            ["instances.id"],
            name=op.f("fk_instance_volumes_instance_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["volume_id"], ["volumes.id"], name=op.f("fk_instance_volumes_volume_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("instance_id", "position", name=op.f("pk_instance_volumes")),
    )
    op.create_index("ix_instance_volumes_volume_id", "instance_volumes", ["volume_id"])


def downgrade() -> None:
    op.drop_table("node_volumes")
    op.drop_table("instance_volumes")
    op.drop_table("volumes")
