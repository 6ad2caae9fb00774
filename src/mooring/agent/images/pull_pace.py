"""Timeouts of pulls, and when a slow pull yields to another project's.

dockerd downloads three layers at a time for all pulls together (`max-concurrent-downloads`), first come,
first served, so one slow registry delays the pulls of every project. A pull that makes too little progress
fails. A slow pull is aborted and retried later while another project's pull waits for a layer.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.instance.state import Reason

LEAST_PROGRESS_BYTES: Final = 2**20  # within `stall_s`: about 9 KB/s
# A pull may wait for a free download slot for this multiple of `stall_s`.
STARVED_STALLS: Final = 5
SLOW_BYTES_PER_S: Final = 2**20
RATE_OVER_S: Final = 10.0
STARVED_AFTER_S: Final = 5.0
LEAST_TURN_S: Final = 15.0
GIVE_WAY_GAP_S: Final = 5.0  # dockerd needs time to start the waiting layers

_OF_LAYERS = frozenset({"Pulling fs layer", "Waiting", "Downloading"})
_IDLE = frozenset({"Pulling fs layer", "Waiting", "Download complete"})
_DONE = frozenset({"Pull complete", "Already exists"})


@dataclass(frozen=True, slots=True)
class PullTimeouts:
    """The longest time without progress, and in total."""

    stall_s: float = 120.0
    total_s: float = 3600.0


@dataclass(slots=True)
class LayerStates:
    """The state of each layer, from the engine's progress lines.

    Attributes:
        steps: counts progress that is not measured in bytes.
    """

    steps: int = 0
    _states: dict[str, str] = field(default_factory=dict)
    _downloaded: dict[str, int] = field(default_factory=dict)
    _unpacked: dict[str, int] = field(default_factory=dict)

    def note(self, layer: str, status: str, detail: Mapping[str, Any]) -> None:
        if status == "Downloading":
            self._downloaded[layer] = detail.get("current") or 0
        elif status == "Extracting" and detail.get("units") == "s":  # seconds spent instead of bytes
            self.steps += 1
        elif status == "Extracting":
            self._unpacked[layer] = detail.get("current") or 0
        if layer in self._states or status in _OF_LAYERS:
            is_step = status in {"Download complete", *_DONE} and self._states.get(layer) != status
            self.steps += is_step
            self._states[layer] = status

    @property
    def moved_bytes(self) -> int:
        """Downloaded and unpacked so far."""
        return sum(self._downloaded.values()) + sum(self._unpacked.values())

    @property
    def left(self) -> list[str]:
        """The states of the layers that are not complete."""
        return [state for state in self._states.values() if state not in _DONE]

    @property
    def starved(self) -> bool:
        """Whether a layer waits for the engine and none is in progress."""
        left = self.left
        return "Waiting" in left and all(state in _IDLE for state in left)


class Deadline:
    """The timeouts of one pull."""

    def __init__(self, timeouts: PullTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self._began = self._moved_at = now
        self._mark = 0, 0

    def passed(self, layers: LayerStates, now: float) -> str | None:
        """Why the pull must fail; None if it may continue."""
        moved_bytes, steps = self._mark
        if layers.moved_bytes >= moved_bytes + LEAST_PROGRESS_BYTES or layers.steps != steps:
            self._mark, self._moved_at = (layers.moved_bytes, layers.steps), now
        patience_s = self._timeouts.stall_s * (STARVED_STALLS if layers.starved else 1)
        if now - self._moved_at >= patience_s:
            return f"less than 1 MiB of it arrived within {patience_s:g} s"
        if now - self._began >= self._timeouts.total_s:
            return f"it was not complete after {self._timeouts.total_s:g} s"
        return None


class Puller:
    """One running pull, as the other pulls see it."""

    def __init__(self, project_id: str, timeouts: PullTimeouts, now: float) -> None:
        self.project_id = project_id
        self.deadline = Deadline(timeouts, now)
        self.starved_since: float | None = None
        self._began = now
        self._moved: deque[tuple[float, int]] = deque()
        self._layers_left = 0

    def note(self, layers: LayerStates, now: float) -> None:
        self._layers_left = len(layers.left)
        if not layers.starved:
            self.starved_since = None
        elif self.starved_since is None:
            self.starved_since = now
        self._moved.append((now, layers.moved_bytes))
        while len(self._moved) > 2 and now - self._moved[1][0] >= RATE_OVER_S:
            self._moved.popleft()

    def is_starving(self, now: float) -> bool:
        return self.starved_since is not None and now - self.starved_since >= STARVED_AFTER_S

    def may_be_broken_off(self, now: float) -> bool:
        """Whether it is slow and has run for `LEAST_TURN_S`."""
        if not self._layers_left or now - self._began < LEAST_TURN_S:
            return False
        (then, before), (_, moved_bytes) = self._moved[0], self._moved[-1]
        return moved_bytes - before < SLOW_BYTES_PER_S * (now - then)


class PullBoard:
    """The pulls that run on one engine. Any thread may call."""

    def __init__(self, timeouts: PullTimeouts | None = None) -> None:
        self._timeouts = timeouts or PullTimeouts()
        self._lock = threading.Lock()
        self._pullers: list[Puller] = []  # oldest first
        self._gave_way_at: float | None = None

    @property
    def stall_s(self) -> float:
        return self._timeouts.stall_s

    @contextmanager
    def joined(self, project_id: str) -> Iterator[Puller]:
        puller = Puller(project_id, self._timeouts, time.monotonic())
        with self._lock:
            self._pullers.append(puller)
        try:
            yield puller
        finally:
            with self._lock:
                self._pullers.remove(puller)

    def check(self, puller: Puller, layers: LayerStates, image: str, now: float) -> None:
        """Call this repeatedly while a pull runs.

        Raises:
            StartRefused: the pull took too long.
            StartDelayed: the pull must yield to another project's.
        """
        if (why := puller.deadline.passed(layers, now)) is not None:
            raise StartRefused(_too_slow(image, why))
        if self._gives_way(puller, layers, now):
            raise StartDelayed(_gave_way(image))

    def _gives_way(self, puller: Puller, layers: LayerStates, now: float) -> bool:
        with self._lock:
            puller.note(layers, now)
            if self._gave_way_at is not None and now - self._gave_way_at < GIVE_WAY_GAP_S:
                return False
            if not any(self._first_to_go(other, now) is puller for other in self._pullers):
                return False
            self._gave_way_at = now
            return True

    def _first_to_go(self, starving: Puller, now: float) -> Puller | None:
        """The pull to abort for this one: of other projects' slow pulls, the oldest that downloads a layer.

        The engine still reports a layer as waiting until its first byte arrives. So if no slow pull seems to
        download, the oldest is aborted.
        """
        if not starving.is_starving(now):
            return None
        slow = [
            other
            for other in self._pullers
            if other.project_id != starving.project_id and other.may_be_broken_off(now)
        ]
        downloading = [other for other in slow if other.starved_since is None]
        return next(iter([*downloading, *slow]), None)


def _too_slow(image: str, why: str) -> Reason:
    return Reason(
        code="image_pull_timeout",
        message=f"{image} could not be pulled: {why}; see whether its registry works, then start again",
    )


def _gave_way(image: str) -> Reason:
    return Reason(
        code="pulling_image",
        message=f"pulling {image}: its registry is slow, so it lets others go first; it is tried again",
    )
