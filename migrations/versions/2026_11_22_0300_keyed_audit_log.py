"""The audit log is signed with a key: tables of links and of heads, and the id of the key."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# By table: the condition on an existing row that a REPLACE of the new row would delete.
TABLES = {
    "audit_links": (
        "number = NEW.number OR entry_seq = NEW.entry_seq OR (chain = NEW.chain AND position = NEW.position)"
    ),
    "audit_heads": "number = NEW.number",
}


def _refuse_changes(table: str, same: str) -> list[str]:
    """Triggers as on `audit_log`. REPLACE of SQLite deletes a row without running the triggers for DELETE."""
    if op.get_bind().dialect.name == "postgresql":
        return [
            f"""
            CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
            FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_log_change()
            """
        ]
    refuse = "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
    return [
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse}",
        f"""
        CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table}
        WHEN EXISTS (SELECT 1 FROM {table} WHERE {same}) {refuse}
        """,  # noqa: S608 - constants
    ]


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("control_plane", sa.Column("audit_key_id", sa.String(), nullable=True))
    op.create_table(
        "audit_links",
        sa.Column("number", big_id, autoincrement=True, nullable=False),
        sa.Column("entry_seq", big_id, nullable=False),
        sa.Column("chain", sa.String(), nullable=False),
        sa.Column("position", big_id, nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_links")),
        sqlite_autoincrement=True,
    )
    op.create_index("uq_audit_links_entry_seq", "audit_links", ["entry_seq"], unique=True)
    op.create_index("uq_audit_links_chain_position", "audit_links", ["chain", "position"], unique=True)
    op.create_table(
        "audit_heads",
        sa.Column("number", big_id, autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_link", big_id, nullable=False),
        sa.Column("links", big_id, nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_heads")),
    )
    for table, same in TABLES.items():
        for statement in _refuse_changes(table, same):
            op.execute(statement)


def downgrade() -> None:
    # The rows of the log remain, each with its signature, but they are no longer linked.
    op.drop_table("audit_heads")
    op.drop_table("audit_links")
    with op.batch_alter_table("control_plane") as batch_op:
        batch_op.drop_column("audit_key_id")
