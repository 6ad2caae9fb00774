"""Does what was decided, in threads, and tells what became of it.

Starts have threads of their own: a pull that hangs must not keep a container from being stopped.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Final, Protocol

from mooring.agent.devices import card_of, devices_of
from mooring.agent.knowledge import Knowledge
from mooring.agent.reconcile import (
    Action,
    Cancel,
    Doing,
    Key,
    Kill,
    Release,
    Remove,
    Restart,
    Start,
    Stop,
    key_of,
)
from mooring.agent.release import ReleaseGate
from mooring.agent.runtime import Container, Runtime, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.agent.workers import Workers
from mooring.core.instance import Reason
from mooring.schemas.agent import Assignment, OverlayNetwork

AWAY: Final = Reason(
    code="docker_unavailable", message="The node's container engine does not answer; it is tried again"
)
BROKEN: Final = Reason(
    code="agent_error", message="The node's agent failed at this, see its log; it is tried again"
)

LOOK_AT_OVERLAYS_S: Final = 15.0  # what was in use then may not be now; what was there may be gone

Change = Callable[[Knowledge], None]
Distrust = Callable[[Iterable[str], str, Reason, str | None], None]

log = logging.getLogger(__name__)


class Tell(Protocol):
    """Takes in a change of what is known; `look` asks for a listing, `hurry` for a report at once."""

    def __call__(self, change: Change, *, look: bool = False, hurry: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class Crew:
    """The threads that act. Nodes of one process may share them."""

    starts: Workers
    endings: Workers
    releases: Workers
    streams: Workers

    @classmethod
    def hired(cls) -> "Crew":
        """Stops wait for as long as users gave their programs to end, so there are many hands for them.

        A release may wait for a driver that hangs, and must not keep a container from being stopped.
        """
        return cls(Workers("start", 16), Workers("end", 64), Workers("release", 64), Workers("stream", 64))


class _OverlayKeeper:
    """Sees to a swarm's networks in one thread at a time, and always to what was wanted last."""

    def __init__(self, runtime: Runtime, workers: Workers) -> None:
        self._runtime, self._workers = runtime, workers
        self._lock = Lock()  # of everything below
        self._wanted: Sequence[OverlayNetwork] = ()
        self._kept: Sequence[OverlayNetwork] | None = None
        self._kept_at = 0.0
        self._busy = False

    def want(self, wanted: Sequence[OverlayNetwork]) -> None:
        with self._lock:
            self._wanted = wanted
            is_kept = wanted == self._kept and time.monotonic() < self._kept_at + LOOK_AT_OVERLAYS_S
            if is_kept or self._busy:
                return
            self._busy = True
        self._workers.submit(self._keep)

    def _keep(self) -> None:
        going_on = True
        while going_on:
            with self._lock:
                wanted = self._wanted
            kept = self._try(wanted)
            with self._lock:
                self._kept, self._kept_at = wanted if kept else None, time.monotonic()
                going_on = self._busy = wanted != self._wanted

    def _try(self, wanted: Sequence[OverlayNetwork]) -> bool:
        try:
            self._runtime.keep_overlays(wanted)
        except Exception as error:
            away = isinstance(error, RuntimeUnavailable)
            log.warning("networks of groups: %s", error, exc_info=None if away else error)
            return False
        return True


class Hands:
    def __init__(
        self, runtime: Runtime, crew: Crew, tell: Tell, distrust: Distrust, gate: ReleaseGate
    ) -> None:
        self._runtime, self._crew, self._tell, self._distrust = runtime, crew, tell, distrust
        self._gate = gate
        self._overlays = _OverlayKeeper(runtime, crew.endings)

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """What a swarm should have, for an engine that manages it; may be said as often as it is heard."""
        self._overlays.want(wanted)

    def do(self, action: Action, known: Knowledge) -> None:
        """Begin one action; `known` notes that it is under way before any thread sees it."""
        match action:
            case Start(assignment):
                devices, in_use = devices_of(assignment), known.gpus_in_use() or set()
                # Whose neighbours are there already is not the first on its card.
                first_on = [uuid for uuid in devices.gpu_uuids if not devices.share or uuid not in in_use]
                cancel = known.begin(
                    key_of(assignment),
                    Doing.START,
                    devices.gpu_uuids,
                    cards=devices.cards,
                    share=devices.share,
                )
                self._crew.starts.submit(partial(self._start, assignment, first_on, cancel))
            case Cancel(key):
                log.info("%s/%s: start cancelled", *key)
                known.cancel(key)
            case Restart(container):
                _begin(known, container, Doing.RESTART)
                self._crew.starts.submit(partial(self._restart, container))
            case Stop(container, timeout_s):
                _begin(known, container, Doing.STOP)
                self._crew.endings.submit(partial(self._stop, container, timeout_s))
            case Kill(container):
                _begin(known, container, Doing.STOP)
                self._crew.endings.submit(partial(self._stop, container, None))
            case Release(container, gpu_uuids, beside):
                # To itself: whoever came to the card now would pass for what the container left behind.
                known.begin(key_of(container), Doing.RELEASE, gpu_uuids)
                self._crew.releases.submit(partial(self._release, container, gpu_uuids, beside))
            case Remove(container):
                _begin(known, container, Doing.REMOVE)
                self._crew.endings.submit(partial(self._remove, container))

    def _start(self, assignment: Assignment, first_on: Sequence[str], cancel: Event) -> None:
        key, began = key_of(assignment), time.monotonic()

        def progress(reason: Reason) -> None:
            self._tell(lambda known: known.progressed(key, reason), hurry=False)

        try:
            self._gate.begins(first_on)
            container = self._runtime.start(assignment, progress, cancel.is_set)
        except StartRefused as refusal:
            self._refused(key, assignment.gpu_uuids, refusal)
        except Exception as error:
            self._failed(key, "start", error)
        else:
            self._started(key, container)
            outcome = container.status if container else "gave up"
            log.info("%s/%s: %s after %.3f s", *key, outcome, time.monotonic() - began)

    def _started(self, key: Key, container: Container | None) -> None:
        if container is None:
            self._tell(lambda known: known.settling(key), look=True)
        else:
            self._tell(lambda known: known.started(key, container))

    def _restart(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.restart(container)
        except StartRefused as refusal:
            self._refused(key, [card_of(container, uuid) for uuid in container.gpu_uuids], refusal)
        except Exception as error:
            self._failed(key, "restart", error)
        else:
            log.info("%s/%s: restarted after exit code %s", *key, container.exit_code)
            self._tell(lambda known: known.settling(key), look=True)

    def _stop(self, container: Container, timeout_s: int | None) -> None:
        """Args: `timeout_s`: null kills."""
        key = key_of(container)
        try:
            if timeout_s is None:
                self._runtime.kill(container)
            else:
                self._runtime.stop(container, timeout_s)
        except Exception as error:
            self._failed(key, "stop", error)
        else:
            log.info("%s/%s: stopped", *key)
            self._tell(lambda known: known.settling(key), look=True)

    def _release(self, container: Container, gpu_uuids: tuple[str, ...], beside: tuple[str, ...]) -> None:
        key = key_of(container)
        try:
            busy = self._gate.wait(container, gpu_uuids, beside)
        except Exception as error:
            self._failed(key, "release", error)
        else:
            for uuid, why in busy.items():
                # Told before the end is: one report carries both, and the card is free to nobody in between.
                reason = Reason(code="gpu_not_released", message=why)
                self._distrust([card_of(container, uuid)], f"{key[0]}/{key[1]}", reason, key[0])
            self._tell(lambda known: known.released(key))

    def _remove(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.remove(container)
        except Exception as error:
            self._failed(key, "removal", error)
        else:
            log.info("%s/%s: removed", *key)
            self._tell(lambda known: known.removed(key))

    def _refused(self, key: Key, gpu_uuids: Iterable[str], refusal: StartRefused) -> None:
        log.warning("%s/%s: not started, %s: %s", *key, refusal.reason.code, refusal.reason.message)
        if refusal.distrust_gpus:
            self._distrust(gpu_uuids, f"{key[0]}/{key[1]}", refusal.reason, key[0])
        self._tell(lambda known: known.refused(key, refusal.reason))

    def _failed(self, key: Key, what: str, error: Exception) -> None:
        """A bug is treated as an engine that is away: it is tried again, ever more slowly."""
        away = isinstance(error, RuntimeUnavailable)
        log.warning("%s/%s: %s failed: %s", *key, what, error, exc_info=None if away else error)
        reason = error.reason if isinstance(error, StartDelayed) else AWAY if away else BROKEN
        self._tell(lambda known: known.failed(key, reason, time.monotonic()), look=True)


def _begin(known: Knowledge, container: Container, doing: Doing) -> None:
    known.begin(key_of(container), doing, container.gpu_uuids, cards=container.cards, share=container.share)
