"""Approved facts of nodes, and how often secrets were handed out for an attempt."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

JSON = sa.JSON(none_as_null=True)
NODES = sa.table(
    "nodes", sa.column("id"), sa.column("facts", JSON), sa.column("approved", JSON), sa.column("deleted_at")
)
GPUS = sa.table(
    "gpus", sa.column("uuid"), sa.column("node_id"), sa.column("model"), sa.column("memory_mib"),
    sa.column("facts", JSON),
)  # fmt: skip

# As control/nodes/approval.py had them in this release.
NODE_FACTS = (
    "labels", "address", "cpus", "memory_mib", "swarm", "simulated_containers", "simulated_gpus",
)  # fmt: skip


def upgrade() -> None:
    with op.batch_alter_table("nodes") as batch_op:
        batch_op.add_column(sa.Column("approved", JSON, nullable=True))
        batch_op.add_column(sa.Column("difference", JSON, nullable=True))
    op.add_column("instances", sa.Column("handout_attempt", sa.Integer(), nullable=True))
    op.add_column(
        "instances", sa.Column("handout_count", sa.Integer(), nullable=False, server_default=sa.text("0"))
    )
    with op.batch_alter_table("instances") as batch_op:
        batch_op.alter_column("handout_count", server_default=None)
    _approve_present_facts()


def _approve_present_facts() -> None:
    """Approve what nodes report when the release is installed, because their operators set them up so."""
    connection = op.get_bind()
    gpus: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in connection.execute(sa.select(GPUS)):
        facts = row.facts or {}
        gpus[row.node_id][row.uuid] = {
            "model": row.model,
            "memory_mib": row.memory_mib,
            "compute_capability": facts.get("compute_capability"),
            "mig_capable": int(facts.get("mig_mode") is not None),
        }
    nodes = connection.execute(sa.select(NODES.c.id, NODES.c.facts).where(NODES.c.deleted_at.is_(None))).all()
    for node_id, facts in nodes:
        if facts:
            approved = {name: facts[name] for name in NODE_FACTS if name in facts}
            # Null means unknown: the first value is approved later. For `swarm` alone it means no swarm.
            approved.setdefault("swarm", None)
            approved["gpus"] = gpus[node_id]
            connection.execute(sa.update(NODES).where(NODES.c.id == node_id).values(approved=approved))


def downgrade() -> None:
    with op.batch_alter_table("instances") as batch_op:
        batch_op.drop_column("handout_count")
        batch_op.drop_column("handout_attempt")
    with op.batch_alter_table("nodes") as batch_op:
        batch_op.drop_column("difference")
        batch_op.drop_column("approved")
