"""Webhooks, their deliveries, and what the events of notices have announced."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0023"
down_revision: str | None = "0022"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("events", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("sealed_secret", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_former_secret", sa.LargeBinary(), nullable=True),
        sa.Column("former_secret_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("after_seq", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_webhooks_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index("uq_webhooks_project_id_name", "webhooks", ["project_id", "name"], unique=True)
    _partial_index("uq_webhooks_name", "webhooks", ["name"], "project_id IS NULL", unique=True)
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("webhook_id", sa.String(), nullable=False),
        sa.Column("event_id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=True),
        sa.Column("order_key", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claim", sa.String(), nullable=True),
        sa.Column("last_code", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'delivered', 'failed', 'dropped')",
            name=op.f("ck_webhook_deliveries_status"),
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_webhook_deliveries")),
        sqlite_autoincrement=True,
    )
    table, pending = "webhook_deliveries", "status = 'pending'"
    op.create_index("uq_webhook_deliveries_id", table, ["id"], unique=True)
    op.create_index("ix_webhook_deliveries_webhook_id_number", table, ["webhook_id", "number"])
    due = f"{pending} AND next_attempt_at IS NOT NULL"
    _partial_index("ix_webhook_deliveries_due", table, ["webhook_id", "next_attempt_at"], due)
    _partial_index("ix_webhook_deliveries_queue", table, ["webhook_id", "order_key", "number"], pending)
    _partial_index("ix_webhook_deliveries_finished_at", table, ["finished_at"], "finished_at IS NOT NULL")
    op.create_table(
        "webhook_progress",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("delivered", "failed", "dropped", "retried")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_progress")),
    )
    op.execute("INSERT INTO webhook_progress SELECT 1, coalesce(max(seq), 0), 0, 0, 0, 0 FROM events")
    with op.batch_alter_table("instances") as batch:
        batch.add_column(sa.Column("expiry_announced", sa.DateTime(timezone=True), nullable=True))
    with op.batch_alter_table("projects") as batch:
        batch.add_column(sa.Column("quotas_announced", sa.JSON(none_as_null=True), nullable=True))


def _partial_index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    op.create_index(
        name, table, columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )


def downgrade() -> None:
    with op.batch_alter_table("projects") as batch:
        batch.drop_column("quotas_announced")
    with op.batch_alter_table("instances") as batch:
        batch.drop_column("expiry_announced")
    op.drop_table("webhook_progress")
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
