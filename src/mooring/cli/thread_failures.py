"""A thread that dies ends its process, so that systemd restarts it.

A process with a part of its threads would look alive and do a part of its work.
"""

import logging
import os
import threading
from typing import Final

EXIT_FAILED: Final = 1

log = logging.getLogger(__name__)


def end_process_on_thread_failure() -> None:
    """End this process with EXIT_FAILED when an exception ends any thread. Containers keep running."""
    threading.excepthook = _end


def _end(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread else "unknown"
    error = failure.exc_value or failure.exc_type()
    log.critical("thread %s failed; this process ends", name, exc_info=error)
    logging.shutdown()
    # Not `sys.exit`, which would end this thread only, and not a signal, whose handler may wait for it.
    os._exit(EXIT_FAILED)
