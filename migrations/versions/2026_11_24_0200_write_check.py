"""A counter that is written to find out whether the database accepts writes."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column(
        "control_plane", sa.Column("write_checks", sa.BigInteger(), server_default="0", nullable=False)
    )


def downgrade() -> None:
    with op.batch_alter_table("control_plane") as batch:
        batch.drop_column("write_checks")
