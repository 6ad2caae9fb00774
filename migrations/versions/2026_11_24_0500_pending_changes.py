"""A count of changes of a project's pending instances, so that schedulers read them again."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("projects", sa.Column("pending_changes", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("projects", "pending_changes")
