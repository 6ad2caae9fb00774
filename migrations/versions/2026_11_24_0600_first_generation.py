"""Nodes begin with generation 1. An agent reports 0 until it has applied an answer."""

from collections.abc import Sequence

from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("UPDATE nodes SET generation = 1 WHERE generation = 0")


def downgrade() -> None:
    """Nothing to do: the earlier release works with any generation."""
