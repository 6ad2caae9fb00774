"""The port proxy: links, their key, and which projects may have public ports."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "port_links",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["instance_id"], ["instances.id"], name=op.f("fk_port_links_instance_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_port_links")),
    )
    op.create_index("ix_port_links_instance_id", "port_links", ["instance_id"])
    with op.batch_alter_table("projects") as batch:
        batch.add_column(sa.Column("public_ports", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("control_plane") as batch:
        batch.add_column(sa.Column("sealed_port_key", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("control_plane") as batch:
        batch.drop_column("sealed_port_key")
    with op.batch_alter_table("projects") as batch:
        batch.drop_column("public_ports")
    op.drop_table("port_links")
