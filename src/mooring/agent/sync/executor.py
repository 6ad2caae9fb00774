"""Executes planned actions in threads, and applies their results to the agent's state.

Pulls, starts, endings, releases and streams have worker pools of their own. In each pool every project has a
limit and a queue (workers.py), so that no project delays another.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Final, Protocol

from mooring.agent.decide.device_claims import devices_of, physical_gpu
from mooring.agent.decide.reconcile import Action, Cancel, Kill, Release, Remove, Restart, Start, Stop, key_of
from mooring.agent.decide.snapshot import ActionKind, Key
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
from mooring.agent.sync.newest_set import NewestSet
from mooring.agent.sync.start_secrets import StartSecretsCache
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.worker_pools import WorkerPools
from mooring.agent.sync.workers import Ticket, Workers
from mooring.schemas.agent import Assignment, OverlayNetwork
from mooring_client.schemas.states import Reason

ENGINE_UNAVAILABLE: Final = Reason(
    code="docker_unavailable", message="The node's container engine does not answer; the agent retries"
)
AGENT_ERROR: Final = Reason(
    code="agent_error", message="An error in the node's agent, see its log; the agent retries"
)
NODE_BUSY: Final = Reason(
    code="node_busy",
    message="Too many starts of this project wait on the node; this one is retried later",
)

StateChange = Callable[[AgentState], None]
ReportIncident = Callable[[Iterable[str], str, Reason, str | None], None]

log = logging.getLogger(__name__)


class ApplyChange(Protocol):
    """Applies a change to the agent's state. `relist` requests a listing, `immediate` a report now."""

    def __call__(self, change: StateChange, *, relist: bool = False, immediate: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class _PlannedStart:
    """One start of an attempt, from the decision to the end of the start."""

    assignment: Assignment
    idle_gpus: Sequence[str]  # of the assignment, those that no other instance uses
    cancel: Event
    owner: str

    @property
    def key(self) -> Key:
        return key_of(self.assignment)


class ActionExecutor:
    """Runs each action in a worker pool, as a task of its project on this node.

    Args:
        node: distinguishes the projects of this node from those of other nodes in the process.
        stops: saves when stop signals were sent.
    """

    def __init__(
        self,
        runtime: Runtime,
        pools: WorkerPools,
        apply: ApplyChange,
        report_incident: ReportIncident,
        gate: ReleaseGate,
        stops: StopTimes,
        secrets: StartSecretsCache,
        node: str = "",
    ) -> None:
        self._runtime, self._pools, self._apply = runtime, pools, apply
        self._report_incident = report_incident
        self._gate, self._stops, self._secrets, self._node = gate, stops, secrets, node
        self._pulls_lock = Lock()
        self._pulls: dict[Key, Ticket] = {}  # those that may still be queued
        self._overlays = NewestSet(runtime.keep_overlays, pools.endings, "overlay networks")
        self._volume_removals = NewestSet(runtime.remove_volumes, pools.endings, "removals of volumes")

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """Create and remove networks of the engine's swarm. Repeated calls with equal networks are cheap."""
        self._overlays.request(wanted)

    def recheck_overlays(self) -> None:
        """Apply the newest networks again, if that failed or is some time ago. For every report."""
        self._overlays.apply_when_due()

    def remove_volumes(self, volume_ids: Sequence[str]) -> None:
        """Remove these volumes, once no container has them. Repeated calls with equal ids are cheap."""
        self._volume_removals.request(volume_ids)

    def recheck_volumes(self) -> None:
        """As `recheck_overlays`, for the newest removals of volumes."""
        self._volume_removals.apply_when_due()

    def execute(self, action: Action, state: AgentState) -> None:
        """Begin one action; `state` notes that it is in progress before any thread runs it.

        If its project's queue is full, nothing is begun: it is planned again when other work has ended.
        """
        match action:
            case Start(assignment):
                self._begin_start(assignment, state)
            case Cancel(key):
                log.info("%s/%s: start cancelled", *key)
                state.cancel(key)
                self._withdraw_pull(key)
            case Restart(container):
                if not self._begin(self._pools.starts, container, ActionKind.RESTART, self._restart, state):
                    state.postpone(key_of(container), NODE_BUSY)
            case Stop(container):
                self._begin(self._pools.endings, container, ActionKind.STOP, self._stop, state)
            case Kill(container):
                self._begin(self._pools.endings, container, ActionKind.STOP, self._kill, state)
            case Release(container, gpu_uuids, shared_gpus):
                owner, key = self._owner(container.owner), key_of(container)
                if self._pools.releases.has_room(owner):
                    # No share, so that nothing starts there: a new process would count as left behind.
                    state.begin_work(key, ActionKind.RELEASE, gpu_uuids)
                    release = partial(self._release, container, gpu_uuids, shared_gpus)
                    self._pools.releases.submit(release, owner)
            case Remove(container):
                self._begin(self._pools.endings, container, ActionKind.REMOVE, self._remove, state)

    def _owner(self, project: str) -> str:
        return f"{self._node}/{project}"

    def _begin(
        self,
        workers: Workers,
        container: Container,
        kind: ActionKind,
        task: Callable[[Container], None],
        state: AgentState,
    ) -> bool:
        """Submit a task; False: its owner's queue is full."""
        owner = self._owner(container.owner)
        if not workers.has_room(owner):
            return False
        state.begin_work(
            key_of(container),
            kind,
            container.gpu_uuids,
            parent_gpus=container.parent_gpus,
            share=container.share,
        )
        # Not bounded: since the check, a start that follows a pull may have taken the last place.
        workers.submit(partial(task, container), owner, bounded=False)
        return True

    # --- starts

    def _begin_start(self, assignment: Assignment, state: AgentState) -> None:
        owner, key = self._owner(assignment.project_id), key_of(assignment)
        if not self._pools.starts.has_room(owner):
            state.postpone(key, NODE_BUSY)
            return
        devices, in_use = devices_of(assignment), state.gpus_in_use() or set()
        idle = [uuid for uuid in devices.gpu_uuids if not devices.share or uuid not in in_use]
        cancel = state.begin_work(
            key, ActionKind.START, devices.gpu_uuids, parent_gpus=devices.parent_gpus, share=devices.share
        )
        planned = _PlannedStart(assignment, idle, cancel, owner)
        start = partial(self._start_with_local_image, planned)
        self._pools.starts.submit(partial(self._start, planned, start), owner, bounded=False)

    def _start_with_local_image(self, planned: _PlannedStart) -> Container | None:
        """Raises as `Runtime.start` and `StartSecretsCache.equip` do."""
        equipped = self._secrets.equip(planned.assignment)
        return self._runtime.start(equipped, self._progress(planned.key), planned.cancel.is_set)

    def _progress(self, key: Key) -> Progress:
        return lambda reason: self._apply(lambda state: state.set_progress(key, reason), immediate=False)

    def _start(self, planned: _PlannedStart, start: BeginStart) -> None:
        key, began = planned.key, time.monotonic()
        try:
            self._gate.note_start(planned.idle_gpus)
            container = start()
        except PullNeeded as needed:
            self._queue_pull(planned, needed.image)
        except StartRefused as refusal:
            self._secrets.forget(key)
            self._refused(key, planned.assignment.gpu_uuids, refusal)
        except Exception as error:
            self._failed(key, "start", error)
        else:
            self._secrets.forget(key)
            self._start_ended(key, container)
            outcome = container.status if container else "cancelled"
            log.info("%s/%s: %s after %.3f s", *key, outcome, time.monotonic() - began)

    def _queue_pull(self, planned: _PlannedStart, image: str) -> None:
        key = planned.key
        message = f"pulling {planned.assignment.spec.image}: waiting for its turn"
        queued = Reason(code="pulling_image", message=message)
        self._progress(key)(queued)
        with self._pulls_lock:
            ticket = self._pools.pulls.submit(partial(self._pull, planned), planned.owner, subject=image)
            if ticket is not None:
                self._pulls[key] = ticket
        if ticket is None:
            self._apply(lambda state: state.failed(key, queued, time.monotonic()), relist=True)
        elif planned.cancel.is_set():  # cancelled before there was a ticket to withdraw
            self._withdraw_pull(key)

    def _withdraw_pull(self, key: Key) -> None:
        """Withdraw a queued pull. A running pull checks its cancel event."""
        with self._pulls_lock:
            ticket = self._pulls.get(key)
            if ticket is None or not self._pools.pulls.withdraw(ticket):
                return
            del self._pulls[key]
        # In a thread: the caller holds the lock that `apply` needs.
        self._pools.endings.submit(partial(self._start_ended, key, None), ticket.owner, bounded=False)

    def _pull(self, planned: _PlannedStart) -> None:
        key = planned.key
        with self._pulls_lock:
            self._pulls.pop(key, None)
        try:
            equipped = self._secrets.equip(planned.assignment)
            start = self._runtime.pull(equipped, self._progress(key), planned.cancel.is_set)
        except StartRefused as refusal:
            self._secrets.forget(key)
            self._refused(key, planned.assignment.gpu_uuids, refusal)
        except Exception as error:
            self._failed(key, "pull", error)
        else:
            self._pulled(planned, start)

    def _pulled(self, planned: _PlannedStart, start: BeginStart | None) -> None:
        if start is None:
            self._start_ended(planned.key, None)
        else:
            self._pools.starts.submit(partial(self._start, planned, start), planned.owner, bounded=False)

    def _start_ended(self, key: Key, container: Container | None) -> None:
        if container is None:
            self._apply(lambda state: state.await_listing(key), relist=True)
        else:
            self._apply(lambda state: state.started(key, container))

    def _restart(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.restart(container)
        except StartRefused as refusal:
            self._refused(key, [physical_gpu(container, uuid) for uuid in container.gpu_uuids], refusal)
        except Exception as error:
            self._failed(key, "restart", error)
        else:
            log.info("%s/%s: restarted after exit code %s", *key, container.exit_code)
            self._apply(lambda state: state.await_listing(key), relist=True)

    # --- endings

    def _stop(self, container: Container) -> None:
        key = key_of(container)
        try:
            sent = self._runtime.begin_stop(container)
        except Exception as error:
            self._failed(key, "stop", error)
            return
        if not sent:
            self._apply(lambda state: state.await_listing(key), relist=True)
            return
        at = time.monotonic()
        log.info("%s/%s: stop signal sent", *key)
        self._apply(lambda state: self._stops.note(state.stop_sent(key, container.container_id, at)))
        self._stops.save()

    def _kill(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.kill(container)
        except Exception as error:
            self._failed(key, "kill", error)
        else:
            log.info("%s/%s: killed", *key)
            self._apply(lambda state: state.await_listing(key), relist=True)

    def _release(
        self, container: Container, gpu_uuids: tuple[str, ...], shared_gpus: tuple[str, ...]
    ) -> None:
        key = key_of(container)
        try:
            busy = self._gate.wait(container, gpu_uuids, shared_gpus)
        except Exception as error:
            self._failed(key, "release", error)
        else:
            for uuid, message in busy.items():
                # Before `released`: the report of the end then has the incident, so the GPU is never free.
                reason = Reason(code="gpu_not_released", message=message)
                self._report_incident([physical_gpu(container, uuid)], f"{key[0]}/{key[1]}", reason, key[0])
            self._apply(lambda state: state.released(key))

    def _remove(self, container: Container) -> None:
        key = key_of(container)
        try:
            self._runtime.remove(container)
        except Exception as error:
            self._failed(key, "removal", error)
        else:
            log.info("%s/%s: removed", *key)
            self._apply(lambda state: state.removed(key))

    def _refused(self, key: Key, gpu_uuids: Iterable[str], refusal: StartRefused) -> None:
        log.warning("%s/%s: not started, %s: %s", *key, refusal.reason.code, refusal.reason.message)
        if refusal.wrong_gpus:
            self._report_incident(gpu_uuids, f"{key[0]}/{key[1]}", refusal.reason, key[0])
        self._apply(lambda state: state.refused(key, refusal.reason))

    def _failed(self, key: Key, what: str, error: Exception) -> None:
        """An unexpected error is retried with the same pauses as an engine that does not answer."""
        expected = isinstance(error, RuntimeUnavailable)
        log.warning("%s/%s: %s failed: %s", *key, what, error, exc_info=None if expected else error)
        if isinstance(error, StartDelayed):
            self._apply(lambda state: state.delayed(key, error, time.monotonic()), relist=True)
        else:
            reason = ENGINE_UNAVAILABLE if expected else AGENT_ERROR
            self._apply(lambda state: state.failed(key, reason, time.monotonic()), relist=True)
