"""Measures how much a folder contains, in a process of its own with limits: its owner may be hostile."""

import logging
import subprocess
from typing import Final

TIMEOUT_S: Final = 60.0
# `du` remembers each file with several links: millions of them must not fill the node's memory.
_MAX_MEMORY_BYTES: Final = 512 * 2**20

log = logging.getLogger(__name__)


def folder_mib(path: str, timeout_s: float = TIMEOUT_S) -> int | None:
    """The space that a folder takes on its own file system, rounded up; None: unknown.

    Unknown if it takes longer than `timeout_s`, or if this machine is not the engine's.
    """
    limits = ["prlimit", f"--as={_MAX_MEMORY_BYTES}", "nice", "-n", "19"]
    command = [*limits, "du", "--summarize", "--block-size=1M", "--one-file-system", "--", path]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("cannot measure %s: %s", path, error)
        return None
    # Files that vanish meanwhile make it fail, with the sum of the others.
    size = done.stdout.split(b"\t", 1)[0]
    return int(size) if size.isdigit() else None
