"""Nodes reserved for projects, labels that a project's nodes must have, and images only on a node."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    with op.batch_alter_table("nodes") as batch_op:
        batch_op.add_column(sa.Column("reserved_for", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
    with op.batch_alter_table("projects") as batch_op:
        batch_op.add_column(sa.Column("node_selector", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(
            sa.Column("local_images", sa.Boolean(), nullable=False, server_default=sa.false())
        )
    # The default project, identified by its name, may still run images that were built on a node.
    projects = sa.table(
        "projects", sa.column("name"), sa.column("deleted_at"), sa.column("local_images", sa.Boolean())
    )
    default = (projects.c.name == "default") & projects.c.deleted_at.is_(None)
    op.execute(projects.update().where(default).values(local_images=True))
    # Only existing rows needed the defaults.
    with op.batch_alter_table("nodes") as batch_op:
        batch_op.alter_column("version", server_default=None)
    with op.batch_alter_table("projects") as batch_op:
        batch_op.alter_column("local_images", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("projects") as batch_op:
        batch_op.drop_column("local_images")
        batch_op.drop_column("node_selector")
    with op.batch_alter_table("nodes") as batch_op:
        batch_op.drop_column("version")
        batch_op.drop_column("reserved_for")
