"""Nodes that `mooring up` runs, which may join again without their agent's files."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_TABLES = ("join_tokens", "nodes")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("local", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "local")
