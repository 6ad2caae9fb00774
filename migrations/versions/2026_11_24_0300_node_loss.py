"""Instances that continue on another node when theirs is lost."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INDEX = "ix_allocations_lost_node_id"


def upgrade() -> None:
    op.add_column("control_plane", _flag("replacement_paused"))
    op.add_column("nodes", _flag("has_lost_attempts"))
    op.add_column("allocations", sa.Column("lost_node_id", sa.String()))
    where = sa.text("to_at IS NULL AND lost_node_id IS NOT NULL")
    op.create_index(_INDEX, "allocations", ["lost_node_id"], postgresql_where=where, sqlite_where=where)


def _flag(name: str) -> "sa.Column[bool]":
    return sa.Column(name, sa.Boolean(), server_default=sa.false(), nullable=False)


def downgrade() -> None:
    # An earlier release releases the GPUs of an instance, also those of the lost node, when it ends.
    op.drop_index(_INDEX, "allocations")
    op.drop_column("allocations", "lost_node_id")
    op.drop_column("nodes", "has_lost_attempts")
    op.drop_column("control_plane", "replacement_paused")
