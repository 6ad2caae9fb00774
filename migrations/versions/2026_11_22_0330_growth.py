"""Growth: retention, and limits on stored bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

DELETED = sa.text("deleted_at IS NOT NULL")
# Fields of the spec that a member takes from its group's template (control/instances/specs.py).
SHARED = ("env", "command", "entrypoint", "working_dir", "user", "ports")

STORED = """
    INSERT INTO project_storage (project_id, stored_bytes, written_bytes, written_on)
    SELECT project_id, SUM(stored), 0, '' FROM (
        SELECT project_id, LENGTH(CAST(spec AS TEXT)) + LENGTH(CAST(labels AS TEXT)) AS stored FROM instances
        UNION ALL
        SELECT project_id, LENGTH(CAST(template AS TEXT)) + LENGTH(CAST(labels AS TEXT)) FROM instance_groups
    ) AS rows_of_all GROUP BY project_id
"""
ANSWERS = """
    INSERT INTO idempotency_usage (holder, stored_bytes)
    SELECT caller, SUM(LENGTH(body)) FROM idempotency_keys WHERE body IS NOT NULL GROUP BY caller
"""
# The triggers of 0003, which SQLite loses when it recreates the table.
MAY_HOLD = """
    milli_held = 0
    OR (NEW.mig_uuid IS NULL AND held_by = NEW.project_id)
    OR (NEW.mig_uuid IS NOT NULL AND held_by IS NULL)
"""
SQLITE_LEDGER = (
    f"""
    CREATE TRIGGER allocations_hold AFTER INSERT ON allocations WHEN NEW.to_at IS NULL
    BEGIN
        SELECT RAISE(ABORT, 'the GPU is held otherwise')
        WHERE NOT EXISTS (SELECT 1 FROM gpus WHERE uuid = NEW.gpu_uuid AND ({MAY_HOLD}));
        UPDATE gpus SET
            milli_held = milli_held + NEW.milli,
            held_by = CASE WHEN NEW.mig_uuid IS NULL THEN NEW.project_id END
        WHERE uuid = NEW.gpu_uuid;
    END
    """,  # noqa: S608 - constants
    """
    CREATE TRIGGER allocations_release AFTER UPDATE OF to_at ON allocations
    WHEN OLD.to_at IS NULL AND NEW.to_at IS NOT NULL
    BEGIN
        UPDATE gpus SET
            milli_held = milli_held - OLD.milli,
            held_by = CASE WHEN milli_held = OLD.milli THEN NULL ELSE held_by END
        WHERE uuid = OLD.gpu_uuid;
    END
    """,
)


def upgrade() -> None:
    op.create_table(
        "instance_records",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=True),
        sa.Column("gpu_count", sa.Integer(), nullable=False),
        sa.Column("gpu_milli", sa.Integer(), nullable=False),
        sa.Column("cpu_milli", sa.Integer(), nullable=True),
        sa.Column("memory_mib", sa.Integer(), nullable=True),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_instance_records_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance_records")),
    )
    op.create_index("ix_instance_records_project_id_id", "instance_records", ["project_id", "id"])
    op.create_table(
        "project_storage",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("written_bytes", sa.BigInteger(), nullable=False),
        sa.Column("written_on", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_project_storage_project_id")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_project_storage")),
    )
    op.create_table(
        "idempotency_usage",
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("holder", name=op.f("pk_idempotency_usage")),
    )
    op.add_column("idempotency_keys", sa.Column("project_id", sa.String(), nullable=True))
    op.add_column("control_plane", sa.Column("events_purged_to", sa.BigInteger(), nullable=True))
    for table in ("instances", "instance_groups"):
        op.create_index(
            f"ix_{table}_deleted_at", table, ["deleted_at"], sqlite_where=DELETED, postgresql_where=DELETED
        )
    op.execute(STORED)
    op.execute(ANSWERS)
    # The ledger is kept longer than the instances.
    with op.batch_alter_table("allocations") as batch_op:
        batch_op.drop_constraint(batch_op.f("fk_allocations_instance_id"), type_="foreignkey")
    if op.get_bind().dialect.name == "sqlite":
        for statement in SQLITE_LEDGER:
            op.execute(statement)


def downgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    _give_members_their_whole_specs()
    # The release before requires an instance for each row of the ledger.
    op.execute("DELETE FROM allocations WHERE instance_id NOT IN (SELECT id FROM instances)")
    # It cannot replay an answer without a body, so such keys are deleted.
    op.execute("DELETE FROM idempotency_keys WHERE status IS NOT NULL AND body IS NULL")
    with op.batch_alter_table("allocations") as batch_op:
        batch_op.create_foreign_key(
            batch_op.f("fk_allocations_instance_id"), "instances", ["instance_id"], ["id"]
        )
    if is_sqlite:
        for statement in SQLITE_LEDGER:
            op.execute(statement)
    op.drop_index("ix_instance_groups_deleted_at", table_name="instance_groups")
    op.drop_index("ix_instances_deleted_at", table_name="instances")
    op.drop_column("control_plane", "events_purged_to")
    op.drop_column("idempotency_keys", "project_id")
    op.drop_table("idempotency_usage")
    op.drop_table("project_storage")
    op.drop_index("ix_instance_records_project_id_id", table_name="instance_records")
    op.drop_table("instance_records")


def _give_members_their_whole_specs() -> None:
    """The release before reads a member's spec from its own row alone."""
    instances = sa.table("instances", sa.column("id"), sa.column("spec", sa.JSON()), sa.column("group_id"))
    groups = sa.table("instance_groups", sa.column("id"), sa.column("template", sa.JSON()))
    connection = op.get_bind()
    for group_id, template in connection.execute(sa.select(groups.c.id, groups.c.template)).all():
        members = sa.select(instances.c.id, instances.c.spec).where(instances.c.group_id == group_id)
        for instance_id, spec in _lacking(connection.execute(members).all()):
            whole = {**{name: template[name] for name in SHARED if name in template}, **spec}
            connection.execute(sa.update(instances).where(instances.c.id == instance_id).values(spec=whole))


def _lacking(rows: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for instance_id, spec in rows:
        if not spec.keys() >= set(SHARED):
            yield instance_id, spec
