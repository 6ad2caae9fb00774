"""Disk: the limits of instances, and projects that require enforced limits."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    # Null: placed by an earlier release, without a limit.
    op.add_column("instances", sa.Column("disk_mib", sa.Integer(), nullable=True))
    op.add_column(
        "projects",
        sa.Column("require_disk_limits", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    with op.batch_alter_table("projects") as batch:
        batch.alter_column("require_disk_limits", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("projects") as batch:
        batch.drop_column("require_disk_limits")
    with op.batch_alter_table("instances") as batch:
        batch.drop_column("disk_mib")
