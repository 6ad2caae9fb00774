"""Rows of streams stay until the stream ends, with what the audit log will record."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    # Streams of the earlier release end with its processes.
    op.execute("DELETE FROM streams")
    with op.batch_alter_table("streams") as batch:
        batch.add_column(sa.Column("is_connected", sa.Boolean(), nullable=False))
        batch.add_column(sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False))
        batch.add_column(sa.Column("audit", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.execute("DELETE FROM streams")
    with op.batch_alter_table("streams") as batch:
        batch.drop_column("audit")
        batch.drop_column("seen_at")
        batch.drop_column("is_connected")
