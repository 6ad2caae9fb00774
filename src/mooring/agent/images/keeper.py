"""Enforces the limits of pulls, and records which images Mooring pulled."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cachetools import TTLCache

from mooring.agent.docker.client import Engine
from mooring.agent.images.collector import names_of, remove_image
from mooring.agent.images.policy import PullLimits
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring_client.schemas.states import Reason

# A name whose image was too large is rejected for this time without another pull.
REJECTED_FOR_S: Final = 600.0
_MAX_REJECTED: Final = 256


class ImageKeeper:
    """The pull limits and the image usage of one engine. Thread-safe. `shown`: an image as users wrote it."""

    def __init__(
        self,
        engine: Engine,
        usage: ImageUsage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = PullLimits()
        self._engine, self._usage = engine, usage or ImageUsage()
        self._lock = threading.Lock()
        # By image name.
        self._rejected: TTLCache[str, Reason] = TTLCache(_MAX_REJECTED, REJECTED_FOR_S, clock)

    def use(self, shown: str, image_id: str) -> None:
        """Mark the image as used. Raises StartDelayed: it is being removed."""
        if not self._usage.use(image_id):
            message = f"{shown} was unused for a long time and is being removed; it will be pulled again"
            raise StartDelayed(Reason(code="image_being_removed", message=message))

    def before(self, shown: str, name: str) -> set[str]:
        """Check whether a pull may begin. Return the ids of the images that are on the node before it.

        Raises:
            StartRefused: `node_disk_full`, or `image_too_large` from a recent pull.
        """
        with self._lock:
            reason = self._rejected.get(name)
        if reason is not None:
            raise StartRefused(reason)
        self.limits.before(shown)
        return self._engine.image_ids()

    def during(self, shown: str, name: str, compressed_bytes: int) -> None:
        """Raises StartRefused: the pull must be aborted."""
        with self._remember_too_large(name):
            self.limits.during(shown, compressed_bytes)

    def after(self, shown: str, name: ImageName, found: dict[str, Any], *, was_there: bool) -> None:
        """Record the pull. Raises StartRefused: the image was too large; removed unless it `was_there`."""
        if not was_there or self._usage.knows(found["Id"]):
            self._usage.add(found["Id"], name.repository)
        try:
            with self._remember_too_large(str(name)):
                self.limits.after(shown, int(found.get("Size") or 0))
        except StartRefused:
            if not was_there:
                remove_image(self._engine, found["Id"], names_of(found))
            raise

    @contextmanager
    def _remember_too_large(self, name: str) -> Iterator[None]:
        try:
            yield
        except StartRefused as refusal:
            if refusal.reason.code == "image_too_large":
                with self._lock:
                    self._rejected[name] = refusal.reason
            raise
