"""The scheduler: shares and MIG devices, groups, reservations, priorities, usage for fair share."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


LIVE = sa.text("deleted_at IS NULL")
HELD = sa.text("to_at IS NULL")
MIG_HELD = sa.text("to_at IS NULL AND mig_uuid IS NOT NULL")

# New columns of tables with rows: a default fills the existing rows, and is then removed.
FILLED = {
    "allocations": ("milli",),
    "gpus": ("milli_held",),
    "instances": ("gpu_milli", "priority", "requeue"),
    "nodes": ("revision",),
    "projects": ("gpu_sharing", "host_network"),
}

# A GPU is free, or allocated whole or in shares to one project, or allocated by its MIG devices.
MAY_HOLD = """
    milli_held = 0
    OR (NEW.mig_uuid IS NULL AND held_by = NEW.project_id)
    OR (NEW.mig_uuid IS NOT NULL AND held_by IS NULL)
"""
HOLD = """
    UPDATE gpus SET
        milli_held = milli_held + NEW.milli,
        held_by = CASE WHEN NEW.mig_uuid IS NULL THEN NEW.project_id END
"""
RELEASE = """
    UPDATE gpus SET
        milli_held = milli_held - OLD.milli,
        held_by = CASE WHEN milli_held = OLD.milli THEN NULL ELSE held_by END
    WHERE uuid = OLD.gpu_uuid
"""
SQLITE_LEDGER = [
    f"""
    CREATE TRIGGER allocations_hold AFTER INSERT ON allocations WHEN NEW.to_at IS NULL
    BEGIN
        SELECT RAISE(ABORT, 'the GPU is held otherwise')
        WHERE NOT EXISTS (SELECT 1 FROM gpus WHERE uuid = NEW.gpu_uuid AND ({MAY_HOLD}));
        {HOLD} WHERE uuid = NEW.gpu_uuid;
    END
    """,  # noqa: S608 - constants
    f"""
    CREATE TRIGGER allocations_release AFTER UPDATE OF to_at ON allocations
    WHEN OLD.to_at IS NULL AND NEW.to_at IS NOT NULL
    BEGIN {RELEASE}; END
    """,
]
POSTGRESQL_LEDGER = [
    f"""
    CREATE FUNCTION hold_gpu() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        {HOLD} WHERE uuid = NEW.gpu_uuid AND ({MAY_HOLD});
        IF NOT FOUND THEN
            RAISE EXCEPTION 'the GPU is held otherwise' USING ERRCODE = 'check_violation';
        END IF;
        RETURN NULL;
    END $$
    """,
    f"""
    CREATE FUNCTION release_gpu() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        {RELEASE};
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER allocations_hold AFTER INSERT ON allocations
    FOR EACH ROW WHEN (NEW.to_at IS NULL) EXECUTE FUNCTION hold_gpu()
    """,
    """
    CREATE TRIGGER allocations_release AFTER UPDATE OF to_at ON allocations
    FOR EACH ROW WHEN (OLD.to_at IS NULL AND NEW.to_at IS NOT NULL) EXECUTE FUNCTION release_gpu()
    """,
]


def upgrade() -> None:
    op.create_table(
        "instance_groups",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("template", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("on_member_failure", sa.String(), nullable=False),
        sa.Column("network", sa.String(), nullable=False),
        sa.Column("encrypted", sa.Boolean(), nullable=False),
        sa.Column("master_port", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("desired_state", sa.String(), nullable=False),
        sa.Column("reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_instance_groups_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance_groups")),
    )
    with op.batch_alter_table("instance_groups") as batch_op:
        batch_op.create_index(
            "uq_instance_groups_project_id_name",
            ["project_id", "name"],
            unique=True,
            sqlite_where=LIVE,
            postgresql_where=LIVE,
        )
        batch_op.create_index("ix_instance_groups_project_id_id", ["project_id", "id"], unique=False)

    op.create_table(
        "reservations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("asked", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("gpu_uuids", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("from_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("to_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_reservations_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reservations")),
    )
    with op.batch_alter_table("reservations") as batch_op:
        batch_op.create_index(
            "ix_reservations_to_at", ["to_at"], unique=False, sqlite_where=LIVE, postgresql_where=LIVE
        )
        batch_op.create_index("ix_reservations_project_id_id", ["project_id", "id"], unique=False)

    op.create_table(
        "project_usages",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("gpu_s", sa.Float(), nullable=False),
        sa.Column("cpu_s", sa.Float(), nullable=False),
        sa.Column("memory_mib_s", sa.Float(), nullable=False),
        sa.Column("as_of", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_project_usages_project_id")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_project_usages")),
    )

    with op.batch_alter_table("allocations") as batch_op:
        batch_op.add_column(sa.Column("milli", sa.Integer(), nullable=False, server_default="1000"))
        batch_op.add_column(sa.Column("mig_uuid", sa.String(), nullable=True))
        batch_op.create_check_constraint(batch_op.f("ck_allocations_milli"), "milli BETWEEN 1 AND 1000")
        batch_op.drop_index("uq_allocations_live_gpu", sqlite_where=HELD, postgresql_where=HELD)
        batch_op.create_index(
            "ix_allocations_live_gpu", ["gpu_uuid"], unique=False, sqlite_where=HELD, postgresql_where=HELD
        )
        batch_op.create_index(
            "uq_allocations_live_mig",
            ["mig_uuid"],
            unique=True,
            sqlite_where=MIG_HELD,
            postgresql_where=MIG_HELD,
        )

    with op.batch_alter_table("gpus") as batch_op:
        batch_op.add_column(sa.Column("milli_held", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("held_by", sa.String(), nullable=True))
        batch_op.create_check_constraint(batch_op.f("ck_gpus_milli_held"), "milli_held BETWEEN 0 AND 1000")

    with op.batch_alter_table("instances") as batch_op:
        batch_op.add_column(sa.Column("gpu_milli", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("priority", sa.Integer(), nullable=False, server_default="50"))
        batch_op.add_column(sa.Column("group_id", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("group_rank", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("placed_as", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("requeue", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.create_index(batch_op.f("ix_instances_group_id"), ["group_id"], unique=False)
        batch_op.create_foreign_key(
            batch_op.f("fk_instances_group_id"), "instance_groups", ["group_id"], ["id"]
        )

    with op.batch_alter_table("nodes") as batch_op:
        batch_op.add_column(sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"))

    with op.batch_alter_table("projects") as batch_op:
        batch_op.add_column(sa.Column("max_priority", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("guaranteed_gpus", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("gpu_sharing", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.add_column(
            sa.Column("host_network", sa.Boolean(), nullable=False, server_default=sa.false())
        )

    op.execute("UPDATE instances SET gpu_milli = gpu_count * 1000")
    # Every GPU that is allocated now is allocated whole, to one instance.
    op.execute(
        "UPDATE gpus SET milli_held = 1000, held_by = (SELECT project_id FROM allocations"
        " WHERE gpu_uuid = gpus.uuid AND to_at IS NULL)"
        " WHERE uuid IN (SELECT gpu_uuid FROM allocations WHERE to_at IS NULL)"
    )
    # Only existing rows needed the defaults.
    for table, columns in FILLED.items():
        with op.batch_alter_table(table) as batch_op:
            for column in columns:
                batch_op.alter_column(column, server_default=None)

    # Last, because a table that SQLite recreates in a batch loses its triggers.
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in SQLITE_LEDGER if is_sqlite else POSTGRESQL_LEDGER:
        op.execute(statement)


def downgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    on = "" if is_sqlite else " ON allocations"
    op.execute(f"DROP TRIGGER allocations_hold{on}")
    op.execute(f"DROP TRIGGER allocations_release{on}")
    if not is_sqlite:
        op.execute("DROP FUNCTION hold_gpu()")
        op.execute("DROP FUNCTION release_gpu()")

    with op.batch_alter_table("projects") as batch_op:
        batch_op.drop_column("host_network")
        batch_op.drop_column("gpu_sharing")
        batch_op.drop_column("guaranteed_gpus")
        batch_op.drop_column("max_priority")

    with op.batch_alter_table("nodes") as batch_op:
        batch_op.drop_column("revision")

    with op.batch_alter_table("instances") as batch_op:
        batch_op.drop_constraint(batch_op.f("fk_instances_group_id"), type_="foreignkey")
        batch_op.drop_index(batch_op.f("ix_instances_group_id"))
        batch_op.drop_column("requeue")
        batch_op.drop_column("placed_as")
        batch_op.drop_column("group_rank")
        batch_op.drop_column("group_id")
        batch_op.drop_column("priority")
        batch_op.drop_column("gpu_milli")

    with op.batch_alter_table("gpus") as batch_op:
        batch_op.drop_constraint(batch_op.f("ck_gpus_milli_held"), type_="check")
        batch_op.drop_column("held_by")
        batch_op.drop_column("milli_held")

    # In the release before, a GPU has one instance: of several live allocations, only the first stays live.
    op.execute(
        "UPDATE allocations SET to_at = CURRENT_TIMESTAMP WHERE to_at IS NULL AND id NOT IN"
        " (SELECT MIN(id) FROM allocations WHERE to_at IS NULL GROUP BY gpu_uuid)"
    )
    with op.batch_alter_table("allocations") as batch_op:
        batch_op.drop_index("uq_allocations_live_mig", sqlite_where=MIG_HELD, postgresql_where=MIG_HELD)
        batch_op.drop_index("ix_allocations_live_gpu", sqlite_where=HELD, postgresql_where=HELD)
        batch_op.create_index(
            "uq_allocations_live_gpu", ["gpu_uuid"], unique=True, sqlite_where=HELD, postgresql_where=HELD
        )
        batch_op.drop_constraint(batch_op.f("ck_allocations_milli"), type_="check")
        batch_op.drop_column("mig_uuid")
        batch_op.drop_column("milli")

    op.drop_table("project_usages")
    op.drop_table("reservations")
    op.drop_table("instance_groups")
