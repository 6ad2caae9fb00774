"""What a pull may bring, and what is remembered of it: its limits, and which images Mooring pulled."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mooring.agent.docker.client import Engine
from mooring.agent.images.collector import names_of, remove_image
from mooring.agent.images.pull_limits import PullLimits
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring.core.instance.state import Reason

# For so long an image that was too large is not pulled again under the same name: others may wait for it.
REFUSED_FOR_S: Final = 600.0
_MOST_REFUSED: Final = 256


class ImageKeeper:
    """Of one engine. Any thread may call."""

    def __init__(
        self,
        engine: Engine,
        pulled: ImageUsage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = PullLimits()
        self._engine, self._pulled, self._clock = engine, pulled or ImageUsage(), clock
        self._lock = threading.Lock()
        self._refused: dict[str, tuple[float, Reason]] = {}  # by name; the oldest first

    def use(self, shown: str, image_id: str) -> None:
        """Raises StartDelayed: it is just being removed."""
        if not self._pulled.use(image_id):
            message = f"{shown} was unused for long and is just being removed; it is pulled again"
            raise StartDelayed(Reason(code="image_being_removed", message=message))

    def before(self, shown: str, name: str) -> set[str]:
        """The ids of the images that are there before a pull.

        Raises:
            StartRefused: `node_disk_full`, or `image_too_large` as a moment ago.
        """
        with self._lock:
            refused_at, reason = self._refused.get(name, (0.0, None))
        if reason is not None and self._clock() - refused_at < REFUSED_FOR_S:
            raise StartRefused(reason)
        self.limits.before(shown)
        return self._engine.image_ids()

    def during(self, shown: str, name: str, compressed_bytes: int) -> None:
        """Raises StartRefused: the pull must be broken off."""
        self._remembering(name, lambda: self.limits.during(shown, compressed_bytes))

    def after(self, shown: str, name: ImageName, found: dict[str, Any], *, was_there: bool) -> None:
        """Raises StartRefused: the image is too large, and was removed again."""
        if not was_there or self._pulled.knows(found["Id"]):
            self._pulled.pulled(found["Id"], name.repository)
        try:
            self._remembering(str(name), lambda: self.limits.after(shown, int(found.get("Size") or 0)))
        except StartRefused:
            if not was_there:
                remove_image(self._engine, found["Id"], names_of(found))
            raise

    def _remembering(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except StartRefused as refusal:
            if refusal.reason.code == "image_too_large":
                with self._lock:
                    self._refused.pop(name, None)
                    self._refused[name] = (self._clock(), refusal.reason)
                    if len(self._refused) > _MOST_REFUSED:
                        del self._refused[next(iter(self._refused))]
            raise
