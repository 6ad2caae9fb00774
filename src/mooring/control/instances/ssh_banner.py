"""What an SSH client sees when its shell starts: where it is, with which GPUs, and for how long."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.db.tables import Allocation, Gpu, Instance, Project
from mooring.db.types import now

WHOLE_GPU = 1000  # thousandths


def banner(session: Session, instance_id: str) -> str:
    """Lines of text about a live instance."""
    row = session.get_one(Instance, instance_id)
    project = session.get_one(Project, row.project_id)
    lines = [f"{row.name} ({row.id}) in project {project.name}", f"GPUs: {_gpus(session, instance_id)}"]
    if row.expires_at is not None:
        lines.append(f"time left: {duration(row.expires_at - now())}")
    return "".join(f"{line}\n" for line in lines)


def _gpus(session: Session, instance_id: str) -> str:
    query = (
        select(Gpu.model, Allocation.milli, func.count())
        .join(Gpu, Gpu.uuid == Allocation.gpu_uuid)
        .where(
            Allocation.instance_id == instance_id,
            Allocation.to_at.is_(None),
            Allocation.lost_node_id.is_(None),
        )
        .group_by(Gpu.model, Allocation.milli)
        .order_by(Gpu.model, Allocation.milli)
    )
    return described([(model, milli, count) for model, milli, count in session.execute(query)])


def described(gpus: Sequence[tuple[str, int, int]]) -> str:
    """Describe GPUs.

    Args:
        gpus: model, thousandths of a GPU, and how many of these.
    """
    parts = [
        f"{count} x {model}" if milli == WHOLE_GPU else f"{count} x {milli / 10:g} % of {model}"
        for model, milli, count in gpus
    ]
    return ", ".join(parts) or "none"


def duration(left: timedelta) -> str:
    """Two units of a duration, rounded down."""
    minutes = max(0, int(left.total_seconds()) // 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
