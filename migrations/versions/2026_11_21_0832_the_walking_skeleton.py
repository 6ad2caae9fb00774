"""The first tables: nodes, GPUs, instances, allocations, projects, API keys, events."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "control_plane",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cursor_secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_control_plane")),
    )
    op.create_table(
        "events",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("instance_id", sa.String(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_instance_id_seq", ["instance_id", "seq"], unique=False)

    op.create_table(
        "idempotency_keys",
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("headers", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("caller", "key", name=op.f("pk_idempotency_keys")),
    )
    with op.batch_alter_table("idempotency_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_idempotency_keys_created_at"), ["created_at"], unique=False)

    op.create_table(
        "join_tokens",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("node_name", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_join_tokens")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_join_tokens_secret_hash")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("credential_hash", sa.String(), nullable=False),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("drain_deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("silent", sa.Boolean(), nullable=False),
        sa.Column("problem", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("samples", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("orphans", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("session", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("heartbeats", sa.BigInteger(), nullable=False),
        sa.Column("last_heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("credential_hash", name=op.f("uq_nodes_credential_hash")),
    )
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index(
            "uq_nodes_name",
            ["name"],
            unique=True,
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )

    op.create_table(
        "projects",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_api_keys_secret_hash"), ["secret_hash"], unique=False)

    op.create_table(
        "gpus",
        sa.Column("uuid", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("health", sa.String(), nullable=False),
        sa.Column("health_reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("last_incident_id", sa.String(), nullable=True),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.CheckConstraint("health IN ('healthy', 'quarantined', 'lost')", name=op.f("ck_gpus_health")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_gpus_node_id")),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpus")),
    )
    with op.batch_alter_table("gpus", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gpus_node_id"), ["node_id"], unique=False)

    op.create_table(
        "instances",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("gpu_count", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("desired_state", sa.String(), nullable=False),
        sa.Column("reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.Column("node_generation", sa.BigInteger(), nullable=False),
        sa.Column("cpu_milli", sa.Integer(), nullable=True),
        sa.Column("memory_mib", sa.Integer(), nullable=True),
        sa.Column("stop_timeout_s", sa.Integer(), nullable=False),
        sa.Column("container_id", sa.String(), nullable=True),
        sa.Column("image_digest", sa.String(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("endpoints", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("max_duration_s", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "desired_state IN ('running', 'stopped', 'deleted')", name=op.f("ck_instances_desired_state")
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'scheduled', 'starting', 'running', 'stopping', "
            "'stopped', 'succeeded', 'failed', 'unreachable', 'deleted')",
            name=op.f("ck_instances_state"),
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_instances_node_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_instances_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instances")),
    )
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.create_index(
            "ix_instances_expires_at",
            ["expires_at"],
            unique=False,
            sqlite_where=sa.text("expires_at IS NOT NULL"),
            postgresql_where=sa.text("expires_at IS NOT NULL"),
        )
        batch_op.create_index(
            "ix_instances_node",
            ["node_id"],
            unique=False,
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )
        batch_op.create_index(
            "ix_instances_pending",
            ["queued_at", "id"],
            unique=False,
            sqlite_where=sa.text("state = 'pending'"),
            postgresql_where=sa.text("state = 'pending'"),
        )
        batch_op.create_index("ix_instances_project_id_id", ["project_id", "id"], unique=False)
        batch_op.create_index(
            "uq_instances_project_id_name",
            ["project_id", "name"],
            unique=True,
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )

    op.create_table(
        "streams",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("request", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_streams_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_streams")),
    )
    with op.batch_alter_table("streams", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_streams_node_id"), ["node_id"], unique=False)

    op.create_table(
        "allocations",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("gpu_uuid", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("from_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("to_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["gpu_uuid"], ["gpus.uuid"], name=op.f("fk_allocations_gpu_uuid")),
        sa.ForeignKeyConstraint(["instance_id"], ["instances.id"], name=op.f("fk_allocations_instance_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_allocations_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allocations")),
    )
    with op.batch_alter_table("allocations", schema=None) as batch_op:
        batch_op.create_index("ix_allocations_instance_id", ["instance_id"], unique=False)
        batch_op.create_index(
            "uq_allocations_live_gpu",
            ["gpu_uuid"],
            unique=True,
            sqlite_where=sa.text("to_at IS NULL"),
            postgresql_where=sa.text("to_at IS NULL"),
        )


def downgrade() -> None:
    with op.batch_alter_table("allocations", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_allocations_live_gpu",
            sqlite_where=sa.text("to_at IS NULL"),
            postgresql_where=sa.text("to_at IS NULL"),
        )
        batch_op.drop_index("ix_allocations_instance_id")

    op.drop_table("allocations")
    with op.batch_alter_table("streams", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_streams_node_id"))

    op.drop_table("streams")
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_instances_project_id_name",
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )
        batch_op.drop_index("ix_instances_project_id_id")
        batch_op.drop_index(
            "ix_instances_pending",
            sqlite_where=sa.text("state = 'pending'"),
            postgresql_where=sa.text("state = 'pending'"),
        )
        batch_op.drop_index(
            "ix_instances_node",
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )
        batch_op.drop_index(
            "ix_instances_expires_at",
            sqlite_where=sa.text("expires_at IS NOT NULL"),
            postgresql_where=sa.text("expires_at IS NOT NULL"),
        )

    op.drop_table("instances")
    with op.batch_alter_table("gpus", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gpus_node_id"))

    op.drop_table("gpus")
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_api_keys_secret_hash"))

    op.drop_table("api_keys")
    op.drop_table("projects")
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_nodes_name",
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )

    op.drop_table("nodes")
    op.drop_table("join_tokens")
    with op.batch_alter_table("idempotency_keys", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_idempotency_keys_created_at"))

    op.drop_table("idempotency_keys")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_instance_id_seq")

    op.drop_table("events")
    op.drop_table("control_plane")
