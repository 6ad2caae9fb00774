"""When an instance reaches its maximum duration."""

from datetime import datetime, timedelta
from math import inf
from typing import Any

from sqlalchemy import Row

from mooring.db.tables import Instance

# The column that these functions read.
COLUMN = Instance.max_duration_s


def end(row: Instance | Row[Any], since: datetime) -> datetime | None:
    """When the instance must end if its duration counts from `since`; None: it is not limited."""
    return since + timedelta(seconds=row.max_duration_s) if row.max_duration_s is not None else None


def end_s(row: Instance | Row[Any], since: datetime) -> float:
    """As `end`, in seconds since the epoch; infinite if it is not limited."""
    ends_at = end(row, since)
    return inf if ends_at is None else ends_at.timestamp()
