"""Templates."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0022"
down_revision: str | None = "0021"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_OF_PROJECT = sa.text("deleted_at IS NULL AND project_id IS NOT NULL")
_GLOBAL = sa.text("deleted_at IS NULL AND project_id IS NULL")


def upgrade() -> None:
    op.create_table(
        "templates",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("description", sa.String(), nullable=False),
        sa.Column("parameters", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("shipped", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_templates_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_templates")),
    )
    op.create_index(
        "uq_templates_project_id_name", "templates", ["project_id", "name"], unique=True,
        sqlite_where=_OF_PROJECT, postgresql_where=_OF_PROJECT,
    )  # fmt: skip
    op.create_index(
        "uq_templates_name",
        "templates",
        ["name"],
        unique=True,
        sqlite_where=_GLOBAL,
        postgresql_where=_GLOBAL,
    )
    op.create_index("uq_templates_shipped", "templates", ["shipped"], unique=True)


def downgrade() -> None:
    op.drop_table("templates")
