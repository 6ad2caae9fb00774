"""Many tenants: quotas, users, members, keys of a project, secrets, registries, the audit log."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


# Instances that have not ended.
ACTIVE = sa.text("state IN ('pending', 'scheduled', 'starting', 'running', 'stopping', 'unreachable')")
LIVE = sa.text("deleted_at IS NULL")

# New columns of tables with rows: a default fills the existing rows, and is then removed.
FILLED = {
    "api_keys": ("prefix",),
    "idempotency_keys": ("sealed",),
    "nodes": ("renewal_due",),
    "projects": ("labels", "quotas", "weight", "security_profile", "version"),
}

SQLITE_APPEND_ONLY = [
    f"""
    CREATE TRIGGER audit_log_no_{verb.lower()} BEFORE {verb} ON audit_log
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
    """
    for verb in ("UPDATE", "DELETE")
] + [
    # REPLACE deletes a row without running the triggers for DELETE.
    """
    CREATE TRIGGER audit_log_no_replace BEFORE INSERT ON audit_log
    WHEN EXISTS (SELECT 1 FROM audit_log WHERE seq = NEW.seq)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
    """
]
POSTGRESQL_APPEND_ONLY = [
    """
    CREATE FUNCTION refuse_audit_log_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
    """,
    """
    CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_log_change()
    """,
]


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("address", sa.String(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("target_id", sa.String(), nullable=True),
        sa.Column("before", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("after", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("previous_hash", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_log")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("audit_log") as batch_op:
        batch_op.create_index("ix_audit_log_project_id_seq", ["project_id", "seq"], unique=False)

    op.create_table(
        "users",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=True),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("issuer", sa.String(), nullable=True),
        sa.Column("subject", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
    )
    with op.batch_alter_table("users") as batch_op:
        batch_op.create_index(
            "uq_users_email", ["email"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
        )
        batch_op.create_index("uq_users_issuer_subject", ["issuer", "subject"], unique=True)

    op.create_table(
        "members",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("role IN ('viewer', 'member', 'owner')", name=op.f("ck_members_role")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_members_project_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_members_user_id")),
        sa.PrimaryKeyConstraint("project_id", "user_id", name=op.f("pk_members")),
    )
    with op.batch_alter_table("members") as batch_op:
        batch_op.create_index(batch_op.f("ix_members_user_id"), ["user_id"], unique=False)

    op.create_table(
        "registries",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("server", sa.String(), nullable=False),
        sa.Column("username", sa.String(), nullable=False),
        sa.Column("sealed_password", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_registries_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registries")),
    )
    with op.batch_alter_table("registries") as batch_op:
        batch_op.create_index("uq_registries_project_id_server", ["project_id", "server"], unique=True)

    op.create_table(
        "secrets",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("sealed_value", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_secrets_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_secrets")),
    )
    with op.batch_alter_table("secrets") as batch_op:
        batch_op.create_index("uq_secrets_project_id_name", ["project_id", "name"], unique=True)

    with op.batch_alter_table("allocations") as batch_op:
        batch_op.create_index("ix_allocations_project_id_to_at", ["project_id", "to_at"], unique=False)

    with op.batch_alter_table("api_keys") as batch_op:
        batch_op.add_column(sa.Column("prefix", sa.String(), nullable=False, server_default="mk_"))
        batch_op.add_column(sa.Column("user_id", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("role", sa.String(), nullable=True))
        batch_op.create_index("ix_api_keys_project_id_id", ["project_id", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_api_keys_user_id"), ["user_id"], unique=False)
        batch_op.create_foreign_key(batch_op.f("fk_api_keys_user_id"), "users", ["user_id"], ["id"])

    with op.batch_alter_table("control_plane") as batch_op:
        batch_op.add_column(sa.Column("key_check", sa.LargeBinary(), nullable=True))

    with op.batch_alter_table("events") as batch_op:
        batch_op.create_index("ix_events_project_id_seq", ["project_id", "seq"], unique=False)

    with op.batch_alter_table("idempotency_keys") as batch_op:
        batch_op.add_column(sa.Column("sealed", sa.Boolean(), nullable=False, server_default=sa.false()))

    with op.batch_alter_table("instances") as batch_op:
        batch_op.drop_index("ix_instances_project_id_id")
        batch_op.create_index(
            "ix_instances_project_id_id",
            ["project_id", "id"],
            unique=False,
            sqlite_where=LIVE,
            postgresql_where=LIVE,
        )
        batch_op.create_index(
            "ix_instances_project_active",
            ["project_id"],
            unique=False,
            sqlite_where=ACTIVE,
            postgresql_where=ACTIVE,
        )

    with op.batch_alter_table("nodes") as batch_op:
        batch_op.add_column(sa.Column("next_credential_hash", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("renewal_due", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.create_unique_constraint(
            batch_op.f("uq_nodes_next_credential_hash"), ["next_credential_hash"]
        )

    with op.batch_alter_table("projects") as batch_op:
        batch_op.add_column(
            sa.Column("labels", sa.JSON(none_as_null=True), nullable=False, server_default="{}")
        )
        batch_op.add_column(
            sa.Column("quotas", sa.JSON(none_as_null=True), nullable=False, server_default="{}")
        )
        batch_op.add_column(sa.Column("weight", sa.Float(), nullable=False, server_default="1"))
        batch_op.add_column(sa.Column("allowed_images", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(
            sa.Column("security_profile", sa.String(), nullable=False, server_default="standard")
        )
        batch_op.add_column(sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
        batch_op.add_column(sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
        batch_op.drop_constraint(batch_op.f("uq_projects_name"), type_="unique")
        batch_op.create_index(
            "uq_projects_name", ["name"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
        )
    # Otherwise a key that was made by hand, without a project and not for admins, could use every project.
    op.execute(
        "UPDATE api_keys SET project_id = (SELECT id FROM projects WHERE name = 'default')"
        " WHERE project_id IS NULL AND CAST(scopes AS TEXT) NOT LIKE '%admin%'"
        " AND CAST(scopes AS TEXT) NOT LIKE '%metrics:read%'"
    )
    # Only existing rows needed the defaults.
    for table, columns in FILLED.items():
        with op.batch_alter_table(table) as batch_op:
            for column in columns:
                batch_op.alter_column(column, server_default=None)

    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in SQLITE_APPEND_ONLY if is_sqlite else POSTGRESQL_APPEND_ONLY:
        op.execute(statement)


def downgrade() -> None:
    # In the release before, names of projects are unique for ever, and every key may act in every project.
    op.execute("UPDATE projects SET name = name || '-' || id WHERE deleted_at IS NOT NULL")
    op.execute(
        "UPDATE api_keys SET revoked_at = CURRENT_TIMESTAMP"
        " WHERE project_id IS NOT NULL OR user_id IS NOT NULL"
    )
    with op.batch_alter_table("projects") as batch_op:
        batch_op.drop_index("uq_projects_name", sqlite_where=LIVE, postgresql_where=LIVE)
        batch_op.create_unique_constraint(batch_op.f("uq_projects_name"), ["name"])
        batch_op.drop_column("deleted_at")
        batch_op.drop_column("version")
        batch_op.drop_column("security_profile")
        batch_op.drop_column("allowed_images")
        batch_op.drop_column("weight")
        batch_op.drop_column("quotas")
        batch_op.drop_column("labels")

    with op.batch_alter_table("nodes") as batch_op:
        batch_op.drop_constraint(batch_op.f("uq_nodes_next_credential_hash"), type_="unique")
        batch_op.drop_column("renewal_due")
        batch_op.drop_column("next_credential_hash")

    with op.batch_alter_table("instances") as batch_op:
        batch_op.drop_index("ix_instances_project_active", sqlite_where=ACTIVE, postgresql_where=ACTIVE)
        batch_op.drop_index("ix_instances_project_id_id")
        batch_op.create_index("ix_instances_project_id_id", ["project_id", "id"], unique=False)

    with op.batch_alter_table("idempotency_keys") as batch_op:
        batch_op.drop_column("sealed")

    with op.batch_alter_table("events") as batch_op:
        batch_op.drop_index("ix_events_project_id_seq")

    with op.batch_alter_table("control_plane") as batch_op:
        batch_op.drop_column("key_check")

    with op.batch_alter_table("api_keys") as batch_op:
        batch_op.drop_constraint(batch_op.f("fk_api_keys_user_id"), type_="foreignkey")
        batch_op.drop_index(batch_op.f("ix_api_keys_user_id"))
        batch_op.drop_index("ix_api_keys_project_id_id")
        batch_op.drop_column("role")
        batch_op.drop_column("user_id")
        batch_op.drop_column("prefix")

    with op.batch_alter_table("allocations") as batch_op:
        batch_op.drop_index("ix_allocations_project_id_to_at")

    with op.batch_alter_table("secrets") as batch_op:
        batch_op.drop_index("uq_secrets_project_id_name")

    op.drop_table("secrets")
    with op.batch_alter_table("registries") as batch_op:
        batch_op.drop_index("uq_registries_project_id_server")

    op.drop_table("registries")
    with op.batch_alter_table("members") as batch_op:
        batch_op.drop_index(batch_op.f("ix_members_user_id"))

    op.drop_table("members")
    with op.batch_alter_table("users") as batch_op:
        batch_op.drop_index("uq_users_issuer_subject")
        batch_op.drop_index("uq_users_email", sqlite_where=LIVE, postgresql_where=LIVE)

    op.drop_table("users")
    with op.batch_alter_table("audit_log") as batch_op:
        batch_op.drop_index("ix_audit_log_project_id_seq")

    op.drop_table("audit_log")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_log_change()")
