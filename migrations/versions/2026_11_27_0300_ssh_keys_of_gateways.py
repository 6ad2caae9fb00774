"""The private keys of the gateways."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    with op.batch_alter_table("control_plane") as batch:
        for name in ("sealed_ssh_host_key", "sealed_ssh_ca_key"):
            batch.add_column(sa.Column(name, sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("control_plane") as batch:
        for name in ("sealed_ssh_host_key", "sealed_ssh_ca_key"):
            batch.drop_column(name)
