"""Times as they go over the wire, without the weight of `datetime`: the NVML process has to stay small."""

import time


def rfc3339(at: float) -> str:
    """Unix time in seconds -> `2026-11-21T12:00:00.000Z`."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"
