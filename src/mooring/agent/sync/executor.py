"""Does what was decided, in threads, and tells what became of it.

Pulls, starts, endings, releases and streams have threads of their own, and in each of these pools every
project has a limit and a queue of its own (workers.py): what one project does there delays nobody else.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Final, Protocol

from mooring.agent.decide.device_claims import card_of, devices_of
from mooring.agent.decide.reconcile import (
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
from mooring.agent.gpus.release import ReleaseGate
from mooring.agent.runtime import (
    Container,
    Progress,
    PullNeeded,
    Runtime,
    RuntimeUnavailable,
    StartDelayed,
    StartRefused,
)
from mooring.agent.runtime import Start as BeginStart
from mooring.agent.sync.agent_state import AgentState
from mooring.agent.sync.start_secrets import StartSecretsOf
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.worker_pools import WorkerPools
from mooring.agent.sync.workers import Ticket, Workers
from mooring.core.instance import Reason
from mooring.schemas.agent import Assignment, OverlayNetwork

AWAY: Final = Reason(
    code="docker_unavailable", message="The node's container engine does not answer; it is tried again"
)
BROKEN: Final = Reason(
    code="agent_error", message="The node's agent failed at this, see its log; it is tried again"
)
BUSY: Final = Reason(
    code="node_busy", message="This project has many starts and stops under way on the node; this one waits"
)

LOOK_AT_OVERLAYS_S: Final = 15.0  # what was in use then may not be now; what was there may be gone

Change = Callable[[AgentState], None]
Distrust = Callable[[Iterable[str], str, Reason, str | None], None]

log = logging.getLogger(__name__)


class Tell(Protocol):
    """Takes in a change of what is known; `look` asks for a listing, `hurry` for a report at once."""

    def __call__(self, change: Change, *, look: bool = False, hurry: bool = True) -> None: ...


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


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One start, from the decision to its end."""

    assignment: Assignment
    first_on: Sequence[str]
    cancel: Event
    owner: str

    @property
    def key(self) -> Key:
        return key_of(self.assignment)


class ActionExecutor:
    """Every pool is used in the name of a project on this node.

    Args:
        node: tells this node's share of the crew from that of other nodes of the process.
        stops: remembers when stop signals were sent.
    """

    def __init__(
        self,
        runtime: Runtime,
        crew: WorkerPools,
        tell: Tell,
        distrust: Distrust,
        gate: ReleaseGate,
        stops: StopTimes,
        secrets: StartSecretsOf,
        node: str = "",
    ) -> None:
        self._runtime, self._crew, self._tell, self._distrust = runtime, crew, tell, distrust
        self._gate, self._stops, self._secrets, self._node = gate, stops, secrets, node
        self._pulls_lock = Lock()
        self._pulls: dict[Key, Ticket] = {}  # those that may still wait for their turn
        self._overlays = _OverlayKeeper(runtime, crew.endings)

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """What a swarm should have, for an engine that manages it; may be said as often as it is heard."""
        self._overlays.want(wanted)

    def do(self, action: Action, known: AgentState) -> None:
        """Begin one action; `known` notes that it is under way before any thread sees it.

        Without room in its project's queue nothing is begun: it is decided again when other work has ended.
        """
        match action:
            case Start(assignment):
                self._begin_start(assignment, known)
            case Cancel(key):
                log.info("%s/%s: start cancelled", *key)
                known.cancel(key)
                self._withdraw_pull(key)
            case Restart(container):
                if not self._begin(self._crew.starts, container, Doing.RESTART, self._restart, known):
                    known.hold_back(key_of(container), BUSY)
            case Stop(container):
                self._begin(self._crew.endings, container, Doing.STOP, self._stop, known)
            case Kill(container):
                self._begin(self._crew.endings, container, Doing.STOP, self._kill, known)
            case Release(container, gpu_uuids, beside):
                owner, key = self._owner(container.owner), key_of(container)
                if self._crew.releases.has_room(owner):
                    # To itself: whoever came to the card now would pass for what the container left behind.
                    known.begin(key, Doing.RELEASE, gpu_uuids)
                    self._crew.releases.submit(partial(self._release, container, gpu_uuids, beside), owner)
            case Remove(container):
                self._begin(self._crew.endings, container, Doing.REMOVE, self._remove, known)

    def _owner(self, project: str) -> str:
        return f"{self._node}/{project}"

    def _begin(
        self,
        workers: Workers,
        container: Container,
        doing: Doing,
        work: Callable[[Container], None],
        known: AgentState,
    ) -> bool:
        """Whether there was room for it."""
        owner = self._owner(container.owner)
        if not workers.has_room(owner):  # who else submits in this name only makes room
            return False
        known.begin(
            key_of(container), doing, container.gpu_uuids, cards=container.cards, share=container.share
        )
        workers.submit(partial(work, container), owner)
        return True

    # --- starts

    def _begin_start(self, assignment: Assignment, known: AgentState) -> None:
        owner, key = self._owner(assignment.project_id), key_of(assignment)
        if not self._crew.starts.has_room(owner):
            known.hold_back(key, BUSY)
            return
        devices, in_use = devices_of(assignment), known.gpus_in_use() or set()
        # Whose neighbours are there already is not the first on its card.
        first_on = [uuid for uuid in devices.gpu_uuids if not devices.share or uuid not in in_use]
        cancel = known.begin(key, Doing.START, devices.gpu_uuids, cards=devices.cards, share=devices.share)
        attempt = _Attempt(assignment, first_on, cancel, owner)
        self._crew.starts.submit(partial(self._start, attempt, partial(self._start_here, attempt)), owner)

    def _start_here(self, attempt: _Attempt) -> Container | None:
        """With the image that is on the node; raises as `Runtime.start`, and as `StartSecretsOf.equip`."""
        equipped = self._secrets.equip(attempt.assignment)
        return self._runtime.start(equipped, self._progress(attempt.key), attempt.cancel.is_set)

    def _progress(self, key: Key) -> Progress:
        return lambda reason: self._tell(lambda known: known.progressed(key, reason), hurry=False)

    def _start(self, attempt: _Attempt, start: BeginStart) -> None:
        key, began = attempt.key, time.monotonic()
        try:
            self._gate.begins(attempt.first_on)
            container = start()
        except PullNeeded as needed:
            self._queue_pull(attempt, needed.image)
        except StartRefused as refusal:
            self._secrets.forget(key)
            self._refused(key, attempt.assignment.gpu_uuids, refusal)
        except Exception as error:
            self._failed(key, "start", error)
        else:
            self._secrets.forget(key)
            self._started(key, container)
            outcome = container.status if container else "gave up"
            log.info("%s/%s: %s after %.3f s", *key, outcome, time.monotonic() - began)

    def _queue_pull(self, attempt: _Attempt, image: str) -> None:
        key = attempt.key
        message = f"pulling {attempt.assignment.spec.image}: waiting for its turn"
        waits = Reason(code="pulling_image", message=message)
        self._progress(key)(waits)
        with self._pulls_lock:
            ticket = self._crew.pulls.submit(partial(self._pull, attempt), attempt.owner, subject=image)
            if ticket is not None:
                self._pulls[key] = ticket
        if ticket is None:
            self._tell(lambda known: known.failed(key, waits, time.monotonic()), look=True)
        elif attempt.cancel.is_set():  # before there was a ticket to withdraw
            self._withdraw_pull(key)

    def _withdraw_pull(self, key: Key) -> None:
        """End a pull that still waits for its turn; one that runs sees by itself that it is cancelled."""
        with self._pulls_lock:
            ticket = self._pulls.get(key)
            if ticket is None or not self._crew.pulls.withdraw(ticket):
                return
            del self._pulls[key]
        # In a thread: who cancels holds what `tell` needs.
        self._crew.endings.submit(partial(self._started, key, None), ticket.owner, bounded=False)

    def _pull(self, attempt: _Attempt) -> None:
        key = attempt.key
        with self._pulls_lock:
            self._pulls.pop(key, None)
        try:
            equipped = self._secrets.equip(attempt.assignment)
            start = self._runtime.pull(equipped, self._progress(key), attempt.cancel.is_set)
        except StartRefused as refusal:
            self._secrets.forget(key)
            self._refused(key, attempt.assignment.gpu_uuids, refusal)
        except Exception as error:
            self._failed(key, "pull", error)
        else:
            self._pulled(attempt, start)

    def _pulled(self, attempt: _Attempt, start: BeginStart | None) -> None:
        if start is None:
            self._started(attempt.key, None)
        else:
            self._crew.starts.submit(partial(self._start, attempt, start), attempt.owner, bounded=False)

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

    # --- endings

    def _stop(self, container: Container) -> None:
        key = key_of(container)
        try:
            began = self._runtime.begin_stop(container)
        except Exception as error:
            self._failed(key, "stop", error)
            return
        if not began:
            self._tell(lambda known: known.settling(key), look=True)
            return
        since = time.monotonic()
        log.info("%s/%s: has its stop signal", *key)

        self._tell(lambda known: self._stops.note(known.stop_begun(key, container.container_id, since)))
        self._stops.save()

    def _kill(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.kill(container)
        except Exception as error:
            self._failed(key, "kill", error)
        else:
            log.info("%s/%s: killed", *key)
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
