"""GPU health: conditions, incidents, and GPUs that are allocated last."""

from collections.abc import Sequence
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "gpu_conditions",
        sa.Column("gpu_uuid", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("standing", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["gpu_uuid"], ["gpus.uuid"], name=op.f("fk_gpu_conditions_gpu_uuid")),
        sa.PrimaryKeyConstraint("gpu_uuid", "code", "project_id", name=op.f("pk_gpu_conditions")),
    )
    op.create_index("ix_gpu_conditions_last_at", "gpu_conditions", ["last_at"])
    op.create_table(
        "gpu_incidents",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("gpu_uuid", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("instance_id", sa.String(), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["gpu_uuid"], ["gpus.uuid"], name=op.f("fk_gpu_incidents_gpu_uuid")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu_incidents")),
    )
    op.create_index("ix_gpu_incidents_gpu_uuid_id", "gpu_incidents", ["gpu_uuid", "id"])
    # Not as a batch, which recreates the table on SQLite: triggers of `allocations` name it.
    op.add_column("gpus", sa.Column("reason_project_id", sa.String(), nullable=True))
    op.add_column("gpus", sa.Column("last_fault_id", sa.String(), nullable=True))
    op.add_column("gpus", sa.Column("placed_last", sa.Boolean(), nullable=False, server_default=sa.false()))
    _explain_quarantined()


def _explain_quarantined() -> None:
    """GPUs that an earlier release took out of use get a condition with the reason."""
    gpus = sa.table(
        "gpus", sa.column("uuid"), sa.column("health"), sa.column("health_reason", sa.JSON(none_as_null=True))
    )
    conditions = sa.table(
        "gpu_conditions",
        *(sa.column(name) for name in ("gpu_uuid", "code", "project_id", "severity", "action", "count")),
        sa.column("since", sa.DateTime(timezone=True)),
        sa.column("last_at", sa.DateTime(timezone=True)),
        sa.column("standing", sa.Boolean()),
    )
    moment = datetime.now(UTC)
    query = sa.select(gpus.c.uuid, gpus.c.health_reason).where(gpus.c.health != "healthy")
    for uuid, reason in op.get_bind().execute(query).all():
        op.execute(
            conditions.insert().values(
                gpu_uuid=uuid, code=(reason or {}).get("code", "unknown_fault"), project_id="", count=1,
                severity="fatal", action="service", since=moment, last_at=moment, standing=False,
            )
        )  # fmt: skip


def downgrade() -> None:
    for column in ("placed_last", "last_fault_id", "reason_project_id"):
        op.drop_column("gpus", column)
    op.drop_table("gpu_incidents")
    op.drop_table("gpu_conditions")
