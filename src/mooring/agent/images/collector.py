"""Removes images that have been unused for a long time, and others while the disk is nearly full.

Removes the least recently used first. Keeps images that have a container, are being pulled, were used
recently, match the operator's patterns, or were not pulled by Mooring.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from mooring.agent.disk.storage import Space
from mooring.agent.docker.client import Engine, is_gone
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import RuntimeUnavailable
from mooring.agent.sync.workers import Workers
from mooring.core.images import ImageName, is_allowed

SWEEP_EVERY_S: Final = 60.0
# Images used within this time are kept: an instance finds its image a few calls before its container exists.
JUST_USED_S: Final = 600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectorPolicy:
    """The operator's settings."""

    max_unused_s: float = 7 * 86_400.0
    high_pct: int = 85
    low_pct: int = 75
    keep: tuple[str, ...] = ()  # patterns of image names
    just_used_s: float = JUST_USED_S


@dataclass(frozen=True, slots=True)
class _Candidate:
    image_id: str
    names: tuple[str, ...]
    unused_s: float


class ImageCollector:
    """Removes unused images of one engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        usage: ImageUsage,
        space: Callable[[], Space | None],
        pulling: Callable[[], Collection[str]],
        policy: CollectorPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._usage, self._space, self._pulling = engine, usage, space, pulling
        self._policy, self._clock = policy or CollectorPolicy(), clock
        self._workers = Workers("images", 1)
        self._sweeping = threading.Lock()
        self._queued = threading.Lock()
        self._swept_at: float | None = None
        self._images_mib: int | None = None

    @property
    def images_mib(self) -> int:
        """The size of all images as of the last sweep. Before the first, may raise RuntimeUnavailable."""
        if self._images_mib is None:
            self._images_mib = _sum_mib(self._engine.images())
        return self._images_mib

    def sweep_soon(self) -> None:
        """Sweep in a separate thread, at most every `SWEEP_EVERY_S`."""
        due = self._swept_at is None or self._clock() - self._swept_at >= SWEEP_EVERY_S
        if due and self._queued.acquire(blocking=False):
            self._workers.submit(self._sweep_once)

    def _sweep_once(self) -> None:
        try:
            self.sweep()
        except RuntimeUnavailable as error:
            log.warning("cannot sweep images: %s", error)
        finally:
            self._swept_at = self._clock()
            self._queued.release()

    def sweep(self, *, make_room: bool = False) -> None:
        """Remove unused images. Raises RuntimeUnavailable: the engine does not answer.

        Args:
            make_room: remove images down to the low watermark even if the high one is not reached.
        """
        with self._sweeping:
            images = self._engine.images()
            in_use = self._engine.image_ids_in_use()
            self._usage.sync({image["Id"] for image in images}, in_use)
            candidates = sorted(self._candidates(images, in_use), key=lambda each: -each.unused_s)
            old = [each for each in candidates if each.unused_s >= self._policy.max_unused_s]
            removed = self._remove_all(old, lambda: True)
            if make_room or self._used_pct() >= self._policy.high_pct:
                younger = [each for each in candidates if each not in old]
                removed |= self._remove_all(younger, lambda: self._used_pct() > self._policy.low_pct)
            self._images_mib = _sum_mib(image for image in images if image["Id"] not in removed)

    def _candidates(self, images: Iterable[dict[str, Any]], in_use: Collection[str]) -> Iterable[_Candidate]:
        for image in images:
            names = names_of(image)
            repositories = {ImageName.parse(name).repository for name in names}
            unused_s = self._usage.unused_s(image["Id"], repositories)
            if unused_s is None or image["Id"] in in_use:
                continue
            if not any(is_allowed(name, self._policy.keep) for name in names):
                yield _Candidate(image["Id"], names, unused_s)

    def _remove_all(self, candidates: Iterable[_Candidate], should_continue: Callable[[], bool]) -> set[str]:
        removed = set()
        for candidate in candidates:
            if not should_continue():
                break
            if self._remove(candidate):
                removed.add(candidate.image_id)
        return removed

    def _remove(self, candidate: _Candidate) -> bool:
        being_pulled = {ImageName.parse(name).repository for name in self._pulling()}
        if any(ImageName.parse(name).repository in being_pulled for name in candidate.names):
            return False
        if not self._usage.begin_removal(candidate.image_id, self._policy.just_used_s):
            return False
        try:
            remove_image(self._engine, candidate.image_id, candidate.names)
        except EngineRefused as refusal:
            # For example, a new container uses the image, or another image is built on it.
            log.info("kept image %s: %s", candidate.image_id, refusal.message)
            return False
        finally:
            self._usage.end_removal(candidate.image_id)
        hours = candidate.unused_s / 3600
        log.info("removed image %s, unused for %.1f h", ", ".join(candidate.names), hours)
        return True

    def _used_pct(self) -> float:
        space = self._space()
        if space is None or not space.total_mib:
            return 0.0
        return 100 * (1 - space.available_mib / space.total_mib)


def remove_image(engine: Engine, image_id: str, names: Iterable[str]) -> None:
    """Remove an image by its names, if it exists, without force. Raises EngineRefused: it is in use."""
    for name in (*names, image_id):
        try:
            engine.remove_image(name)
        except EngineRefused as refusal:
            if not is_gone(refusal):
                raise


def names_of(image: dict[str, Any]) -> tuple[str, ...]:
    """Return all names of an image in the engine, tags first."""
    listed = [*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())]
    return tuple(name for name in listed if not name.startswith("<none>"))


def _sum_mib(images: Iterable[dict[str, Any]]) -> int:
    """Return a size that counts shared layers for each image, in steps of 64 MiB: each change is stored."""
    return sum(int(image.get("Size") or 0) for image in images) // 2**26 * 64
