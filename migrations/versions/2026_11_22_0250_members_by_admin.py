"""Memberships: whether an admin or an owner added the user."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    # For existing members the project remains their default project.
    with op.batch_alter_table("members") as table:
        table.add_column(sa.Column("by_admin", sa.Boolean(), nullable=False, server_default=sa.true()))
    with op.batch_alter_table("members") as table:
        table.alter_column("by_admin", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("members") as table:
        table.drop_column("by_admin")
