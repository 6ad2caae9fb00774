"""When an instance started and stopped, from the times that its node reports.

The node's clock may be wrong or may jump, so its times only count within bounds of the control plane's clock.
"""

from datetime import datetime


def started(earliest: datetime, latest: datetime, reported: str | None) -> datetime:
    """When the container started.

    Args:
        earliest: when the instance was placed on the node.
        latest: the present time, which is also the answer if the node reports no valid time.
        reported: the node's time, in ISO 8601 with a zone.
    """
    return _bounded(earliest, _parsed(reported), latest)


def stopped(since: datetime, latest: datetime, reported_start: str | None, reported: str | None) -> datetime:
    """When the container stopped, which is at least as long after its start as the node measured.

    Args:
        since: what `started` returned. The container may have been restarted since.
        latest: the present time, which is also the answer if the node reports no valid time.
        reported_start: the node's time of the last start.
        reported: the node's time of the stop.
    """
    begin, end = _parsed(reported_start), _parsed(reported)
    at = _bounded(since, end, latest)
    if begin is None or end is None:
        return at
    if end < begin:
        return latest  # the node's clock was set back meanwhile
    return min(max(at, since + (end - begin)), latest)


def _bounded(earliest: datetime, time: datetime | None, latest: datetime) -> datetime:
    return min(max(earliest, time or latest), latest)


def _parsed(reported: str | None) -> datetime | None:
    try:
        time = datetime.fromisoformat(reported or "")
    except ValueError:
        return None
    return time if time.tzinfo else None
