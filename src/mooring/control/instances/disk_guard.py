"""The guard of disk space at the write: the locked node's facts against what a plan says."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.db.tables import Instance, Project
from mooring.scheduler.model import Placement


class DiskGuard:
    """Whether the node of a placement has the disk, and enforces limits where the project requires that."""

    def __init__(self, session: Session, placements: Sequence[Placement]) -> None:
        # The spec and the project are read again: a plan is older than the transaction that writes it down.
        query = (
            select(Instance.id, Instance.spec["disk_mib"].as_integer(), Project.require_disk_limits)
            .join(Project, Project.id == Instance.project_id)
            .where(Instance.id.in_({placement.instance_id for placement in placements}))
        )
        self._asked = {key: (disk_mib, limits) for key, disk_mib, limits in session.execute(query)}

    def fits(self, facts: Mapping[str, Any], placement: Placement, after_mib: int) -> bool:
        """Args: after_mib: what all instances of the node hold with this one."""
        asked_mib, limits = self._asked[placement.instance_id]
        disk = facts.get("disk")
        if disk is None:
            return asked_mib is None and not limits
        if disk["pressure"] or (limits and not disk["enforced"]):
            return False
        return placement.disk_mib >= (asked_mib or 0) and after_mib <= disk["allocatable_mib"]
