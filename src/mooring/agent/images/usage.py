"""Which of the engine's images Mooring pulled, and how long each has been unused.

Mooring removes no other images. The time is measured with a monotonic clock while the agent runs: a jump of
the wall clock removes nothing.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.agent.sync.identity import StateDirectory

FILE: Final = "image_usage"
SAVE_EVERY_S: Final = 600.0

log = logging.getLogger(__name__)


class _SavedImage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    unused_s: float
    repositories: list[str]


class _UsageFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    images: dict[str, _SavedImage] = {}


@dataclass(slots=True)
class _Image:
    repositories: set[str]
    unused_s: float  # at `since`
    since: float  # on the clock


class ImageUsage:
    """The usage of images by id. Thread-safe; the only I/O under the lock is the agent's own small file."""

    def __init__(
        self,
        saved: bytes | None = None,
        save: Callable[[bytes], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._save, self._clock = save, clock
        self._removing: set[str] = set()
        self._saved_at = clock()
        self._known = {
            image_id: _Image(set(image.repositories), image.unused_s, clock())
            for image_id, image in _read(saved).images.items()
        }

    @classmethod
    def of_node(cls, state: StateDirectory) -> "ImageUsage":
        return cls(state.read(FILE), lambda content: state.write(FILE, content))

    def add(self, image_id: str, repository: str) -> None:
        """Record a pull of an image that was not on the node before, or that Mooring pulled earlier."""
        with self._lock:
            known = self._known.setdefault(image_id, _Image(set(), 0.0, self._clock()))
            known.repositories.add(repository)
            known.unused_s, known.since = 0.0, self._clock()
            self._write()

    def knows(self, image_id: str) -> bool:
        with self._lock:
            return image_id in self._known

    def use(self, image_id: str) -> bool:
        """Mark the image as used, which delays its removal. Return False if it is being removed."""
        with self._lock:
            if image_id in self._removing:
                return False
            self._touch(image_id)
            return True

    def sync(self, image_ids: Collection[str], in_use: Collection[str]) -> None:
        """Drop images that the engine no longer has, and mark those with containers as used."""
        with self._lock:
            gone = self._known.keys() - set(image_ids)
            for image_id in gone:
                del self._known[image_id]
            for image_id in in_use:
                self._touch(image_id)
            if gone or self._clock() - self._saved_at > SAVE_EVERY_S:
                self._write()

    def unused_s(self, image_id: str, repositories: Collection[str]) -> float | None:
        """Return how long the image has been unused; None if Mooring must not remove it.

        Args:
            repositories: all of its repositories in the engine. Mooring must have pulled it from each.
        """
        with self._lock:
            known = self._known.get(image_id)
            if known is None or not known.repositories.issuperset(repositories):
                return None
            return known.unused_s + self._clock() - known.since

    def begin_removal(self, image_id: str, min_unused_s: float) -> bool:
        """Return whether the image may be removed now. If so, `use` fails until `end_removal`."""
        with self._lock:
            known = self._known.get(image_id)
            if known is None or known.unused_s + self._clock() - known.since < min_unused_s:
                return False
            self._removing.add(image_id)
            return True

    def end_removal(self, image_id: str) -> None:
        with self._lock:
            self._removing.discard(image_id)

    def _touch(self, image_id: str) -> None:
        if known := self._known.get(image_id):
            known.unused_s, known.since = 0.0, self._clock()

    def _write(self) -> None:
        now = self._saved_at = self._clock()
        images = {
            image_id: {
                "unused_s": round(image.unused_s + now - image.since, 1),
                "repositories": sorted(image.repositories),
            }
            for image_id, image in sorted(self._known.items())
        }
        try:
            self._save(json.dumps({"images": images}).encode())
        except OSError as error:  # on a full disk, images must still be removed
            log.warning("cannot save the list of pulled images: %s", error)


def _read(saved: bytes | None) -> _UsageFile:
    try:
        return _UsageFile.model_validate_json(b"{}" if saved is None else saved)
    except ValidationError:
        log.warning("the agent's file %s is damaged: images pulled before are never removed", FILE)
        return _UsageFile()
