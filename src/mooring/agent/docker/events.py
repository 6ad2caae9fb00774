"""Follows the engine's events in a thread, and connects again whenever they end."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from mooring.agent.runtime import RuntimeUnavailable

RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


def follow(
    changes: Callable[[], Iterator[None]], on_change: Callable[[], None], ended: Callable[[], bool]
) -> None:
    """Begin to call `on_change` for each of the changes, and after each interruption: one may be missed."""

    def run() -> None:
        while not ended():
            try:
                for _ in changes():
                    on_change()
            except RuntimeUnavailable as error:
                log.info("the engine's event stream ended: %s", error)
            except Exception:
                log.exception("the engine's event stream failed")
            time.sleep(RETRY_S)
            on_change()

    threading.Thread(target=run, name="engine-events", daemon=True).start()
