"""Parallel writers: stored bytes of projects in stripes, and a record of all deleted events."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

KEY = "pk_project_storage"
# Until now the lowest `seq` told which events retention had deleted.
DELETED_EVENTS = """
    UPDATE control_plane SET events_purged_to = (SELECT MIN(seq) - 1 FROM events)
    WHERE coalesce(events_purged_to, 0) < (SELECT MIN(seq) - 1 FROM events)
"""
SUMS = """
    UPDATE project_storage SET
        stored_bytes = (SELECT SUM(each.stored_bytes) FROM project_storage AS each
            WHERE each.project_id = project_storage.project_id),
        written_bytes = (SELECT SUM(each.written_bytes) FROM project_storage AS each
            WHERE each.project_id = project_storage.project_id AND each.written_on = newest.written_on),
        written_on = newest.written_on
    FROM (SELECT project_id, MAX(written_on) AS written_on, MIN(stripe) AS stripe
        FROM project_storage GROUP BY project_id) AS newest
    WHERE project_storage.project_id = newest.project_id AND project_storage.stripe = newest.stripe
"""
OTHERS = """
    DELETE FROM project_storage WHERE stripe > (SELECT MIN(each.stripe) FROM project_storage AS each
        WHERE each.project_id = project_storage.project_id)
"""


def upgrade() -> None:
    op.add_column("project_storage", sa.Column("stripe", sa.Integer(), nullable=False, server_default="0"))
    _set_key("project_id", "stripe")
    op.execute(DELETED_EVENTS)


def downgrade() -> None:
    op.execute(SUMS)
    op.execute(OTHERS)
    _set_key("project_id")
    with op.batch_alter_table("project_storage") as batch:
        batch.drop_column("stripe")


def _set_key(*columns: str) -> None:
    with op.batch_alter_table("project_storage") as batch:
        if "stripe" in columns:
            batch.alter_column("stripe", server_default=None)
        batch.drop_constraint(KEY, type_="primary")
        batch.create_primary_key(KEY, list(columns))
