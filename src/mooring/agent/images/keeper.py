"""Applies the limits of pulls, and records which images Mooring pulled."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from cachetools import TTLCache

from mooring.agent.docker.client import Engine
from mooring.agent.images.collector import names_of, remove_image
from mooring.agent.images.policy import PullLimits
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring.core.instance.state import Reason

# A name whose image was too large is rejected for this time without another pull.
REFUSED_FOR_S: Final = 600.0
_MOST_REFUSED: Final = 256


class ImageKeeper:
    """Of one engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        pulled: ImageUsage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = PullLimits()
        self._engine, self._pulled = engine, pulled or ImageUsage()
        self._lock = threading.Lock()
        self._refused: TTLCache[str, Reason] = TTLCache(_MOST_REFUSED, REFUSED_FOR_S, clock)  # by image name

    def use(self, shown: str, image_id: str) -> None:
        """Mark the image as used. Raises StartDelayed: it is being removed."""
        if not self._pulled.use(image_id):
            message = f"{shown} was unused for long and is just being removed; it is pulled again"
            raise StartDelayed(Reason(code="image_being_removed", message=message))

    def before(self, shown: str, name: str) -> set[str]:
        """The ids of the images on the node before a pull.

        Raises:
            StartRefused: `node_disk_full`, or `image_too_large` from a recent pull.
        """
        with self._lock:
            reason = self._refused.get(name)
        if reason is not None:
            raise StartRefused(reason)
        self.limits.before(shown)
        return self._engine.image_ids()

    def during(self, shown: str, name: str, compressed_bytes: int) -> None:
        """Raises StartRefused: the pull must be aborted."""
        self._remembering(name, lambda: self.limits.during(shown, compressed_bytes))

    def after(self, shown: str, name: ImageName, found: dict[str, Any], *, was_there: bool) -> None:
        """Record the pull. Raises StartRefused: the image was too large and is removed."""
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
                    self._refused[name] = refusal.reason
            raise
