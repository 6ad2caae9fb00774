"""Timeouts of pulls, and when a slow pull yields to another project's.

dockerd downloads three layers at a time for all pulls together (`max-concurrent-downloads`), first come,
first served, so one slow registry delays every project's pulls. A pull that makes too little progress fails.
A slow pull is aborted, and retried later, if another project's pull waits for a layer.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mooring.agent.runtime import StartDelayed, StartRefused
from mooring_client.schemas.states import Reason

MIN_PROGRESS_BYTES: Final = 2**20  # within `stall_s`: about 9 KB/s
STARVED_STALLS: Final = 5  # a pull may wait for a download slot for this multiple of `stall_s`
SLOW_BYTES_PER_S: Final = 2**20
RATE_OVER_S: Final = 10.0  # a pull's rate is measured over this time
STARVED_AFTER_S: Final = 5.0
MIN_RUN_S: Final = 15.0  # younger pulls are not aborted
YIELD_INTERVAL_S: Final = 5.0  # dockerd needs time to start the waiting layers

_LAYER_STATES = frozenset({"Pulling fs layer", "Waiting", "Downloading"})  # of layers only, not of images
_IDLE = frozenset({"Pulling fs layer", "Waiting", "Download complete"})
_DONE = frozenset({"Pull complete", "Already exists"})


@dataclass(frozen=True, slots=True)
class PullTimeouts:
    """The longest time without progress, and in total."""

    stall_s: float = 120.0
    total_s: float = 3600.0


@dataclass(slots=True)
class LayerStates:
    """The state of each layer, as the engine reports it."""

    steps: int = 0  # counts progress that is not measured in bytes
    _states: dict[str, str] = field(default_factory=dict)
    _downloaded: dict[str, int] = field(default_factory=dict)
    _unpacked: dict[str, int] = field(default_factory=dict)

    def update(self, layer: str, status: str, detail: Mapping[str, Any]) -> None:
        if status == "Downloading":
            self._downloaded[layer] = detail.get("current") or 0
        elif status == "Extracting" and detail.get("units") == "s":  # seconds spent instead of bytes
            self.steps += 1
        elif status == "Extracting":
            self._unpacked[layer] = detail.get("current") or 0
        if layer in self._states or status in _LAYER_STATES:
            is_step = status in {"Download complete", *_DONE} and self._states.get(layer) != status
            self.steps += is_step
            self._states[layer] = status

    @property
    def moved_bytes(self) -> int:
        """The bytes downloaded and unpacked so far."""
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
        self._progress = 0, 0  # bytes moved and steps, at `_moved_at`

    def exceeded(self, layers: LayerStates, now: float) -> str | None:
        """Return why the pull must fail; None if it may continue."""
        moved_bytes, steps = self._progress
        if layers.moved_bytes >= moved_bytes + MIN_PROGRESS_BYTES or layers.steps != steps:
            self._progress, self._moved_at = (layers.moved_bytes, layers.steps), now
        stall_s = self._timeouts.stall_s * (STARVED_STALLS if layers.starved else 1)
        if now - self._moved_at >= stall_s:
            return f"less than 1 MiB arrived within {stall_s:g} s"
        if now - self._began >= self._timeouts.total_s:
            return f"it was not complete after {self._timeouts.total_s:g} s"
        return None


class RunningPull:
    """The progress of one pull, by which `RunningPulls` chooses the pull that must yield."""

    def __init__(self, project_id: str, timeouts: PullTimeouts, now: float) -> None:
        self.project_id = project_id
        self.deadline = Deadline(timeouts, now)
        self.starved_since: float | None = None
        self._began = now
        self._moved: deque[tuple[float, int]] = deque()
        self._layers_left = 0

    def update(self, layers: LayerStates, now: float) -> None:
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

    def may_be_aborted(self, now: float) -> bool:
        """Return whether the pull is slow and has run for `MIN_RUN_S`."""
        if not self._layers_left or now - self._began < MIN_RUN_S:
            return False
        (then, before), (_, moved_bytes) = self._moved[0], self._moved[-1]
        return moved_bytes - before < SLOW_BYTES_PER_S * (now - then)


class RunningPulls:
    """The pulls that run on one engine. Thread-safe."""

    def __init__(self, timeouts: PullTimeouts | None = None) -> None:
        self._timeouts = timeouts or PullTimeouts()
        self._lock = threading.Lock()
        self._pulls: list[RunningPull] = []  # oldest first
        self._yielded_at: float | None = None

    @property
    def stall_s(self) -> float:
        return self._timeouts.stall_s

    @contextmanager
    def add(self, project_id: str) -> Iterator[RunningPull]:
        """Add a pull for the duration of the block."""
        pull = RunningPull(project_id, self._timeouts, time.monotonic())
        with self._lock:
            self._pulls.append(pull)
        try:
            yield pull
        finally:
            with self._lock:
                self._pulls.remove(pull)

    def check(self, pull: RunningPull, layers: LayerStates, image: str, now: float) -> None:
        """Check repeatedly whether a pull may continue.

        Raises:
            StartRefused: the pull took too long.
            StartDelayed: the pull must yield to another project's.
        """
        if (why := pull.deadline.exceeded(layers, now)) is not None:
            message = f"{image} could not be pulled: {why}; check its registry, then start the instance again"
            raise StartRefused(Reason(code="image_pull_timeout", message=message))
        if self._must_yield(pull, layers, now):
            message = f"pulling {image}: its registry is slow; other pulls run first, then it is retried"
            raise StartDelayed(Reason(code="pulling_image", message=message))

    def _must_yield(self, pull: RunningPull, layers: LayerStates, now: float) -> bool:
        with self._lock:
            pull.update(layers, now)
            if self._yielded_at is not None and now - self._yielded_at < YIELD_INTERVAL_S:
                return False
            if not any(self._pull_to_abort(other, now) is pull for other in self._pulls):
                return False
            self._yielded_at = now
            return True

    def _pull_to_abort(self, starving: RunningPull, now: float) -> RunningPull | None:
        """Return the oldest of other projects' slow pulls that downloads a layer; if none does, the oldest.

        The engine reports a layer as waiting until its first byte arrives.
        """
        if not starving.is_starving(now):
            return None
        slow = [
            other
            for other in self._pulls
            if other.project_id != starving.project_id and other.may_be_aborted(now)
        ]
        downloading = [other for other in slow if other.starved_since is None]
        return next(iter([*downloading, *slow]), None)
