"""Formats times for messages, without importing `datetime`: the NVML process must stay small."""

import time


def rfc3339(at: float) -> str:
    """Unix time in seconds -> `2026-11-21T12:00:00.000Z`."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"
