"""Decides the node's next actions from the desired and the observed state. No clock, no threads, no state.

    absent   --Start-->           running   creates, starts and verifies the container
    created  --Start-->           running   adopts the container of an interrupted start
    running  --Stop, Kill-->      exited
    exited   --Restart-->         running   if the user's policy asks for it, after a pause
    exited   --Release, Remove--> absent

A container that is neither assigned nor to be removed is never touched, unless it is in `kill_reasons`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Final

from mooring.agent.decide.device_claims import ClaimTable, Devices, HasDevices, claimed_uuids, devices_of
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, PlannedRestart, Work
from mooring.agent.runtime import Container
from mooring.core.backoff import backoff_s
from mooring.schemas.agent import Assignment, OverlayNetwork, Removal
from mooring_client.schemas.states import Reason

ENDED: Final = frozenset({"exited", "dead"})
LONGEST_PAUSE_S: Final = 60  # before a restart
FENCE_TIMEOUT_S: Final = 10  # from the stop signal to the kill
NO_CONTACT: Final = Reason(
    code="self_fenced",
    message="The node had no contact with the control plane, which may have replaced this attempt",
)
STEADY_AFTER_S: Final = 60  # a run of this length resets the restart pause


@dataclass(frozen=True, slots=True)
class Start:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a start that is in progress."""

    key: Key


@dataclass(frozen=True, slots=True)
class Restart:
    container: Container


@dataclass(frozen=True, slots=True)
class Stop:
    """Send the stop signal. No thread waits for the end: a kill follows when the stop timeout is over."""

    container: Container


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL: the stop timeout is over, or the container is in `kill_reasons`."""

    container: Container


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until an ended container's GPUs that no other container uses, `gpu_uuids`, are idle (R11).

    Other containers still use `shared_gpus`: there, only the ended container's processes must be gone.
    """

    container: Container
    gpu_uuids: tuple[str, ...]
    shared_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remove:
    container: Container


Action = Start | Cancel | Restart | Stop | Kill | Release | Remove


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    actions: tuple[Action, ...]
    waiting: Mapping[Key, Reason]  # why a wanted start does not happen now
    restarts: Mapping[Key, PlannedRestart]
    due: float | None  # when to plan again even if nothing happens


@dataclass(frozen=True, slots=True)
class OverlayChanges:
    create: tuple[OverlayNetwork, ...]
    remove: tuple[str, ...]


def overlay_changes(wanted: Iterable[OverlayNetwork], present: Iterable[str]) -> OverlayChanges:
    """The overlay networks that a swarm manager creates and removes for its groups.

    Args:
        present: the names of existing networks with Mooring's labels.
    """
    by_name, existing = {overlay.name: overlay for overlay in wanted}, set(present)
    missing = tuple(overlay for name, overlay in sorted(by_name.items()) if name not in existing)
    return OverlayChanges(missing, tuple(sorted(existing - by_name.keys())))


def decide(snapshot: AgentSnapshot, now: float) -> ReconcilePlan:
    """Return the actions to begin now. A start waits until its devices are released."""
    endings = tuple(_endings(snapshot, now))
    starts = _StartPlanner(snapshot, now)
    for key in sorted(snapshot.assignments, key=_newest_attempt_first):
        starts.consider(key, snapshot.assignments[key])
    return ReconcilePlan(
        (*endings, *starts.actions),
        starts.waiting,
        starts.restarts,
        _next_due(snapshot, now, starts.restarts),
    )


def key_of(item: Assignment | Removal | Container) -> Key:
    return item.instance_id, item.attempt


def is_live(container: Container) -> bool:
    """Whether the container may use GPUs: it has begun and has not ended."""
    return container.status != "created" and container.status not in ENDED


def will_restart(assignment: Assignment | None, container: Container) -> bool:
    """Whether the user's policy asks to start this exited container again."""
    if assignment is None or assignment.want != "running" or container.status not in ENDED:
        return False
    policy = assignment.spec.restart
    return policy == "always" or (policy == "on_failure" and container.exit_code != 0)


def _may_begin(snapshot: AgentSnapshot, assignment: Assignment) -> bool:
    """Whether another node cannot be running the instance."""
    return snapshot.has_contact or assignment.spec.on_node_loss != "replace"


def _newest_attempt_first(key: Key) -> tuple[str, int]:
    instance_id, attempt = key
    return instance_id, -attempt


def _endings(snapshot: AgentSnapshot, now: float) -> Iterator[Action]:
    yield from _releases(snapshot, now)
    for key in sorted(snapshot.kill_reasons):
        container = snapshot.containers.get(key)
        if container is not None and is_live(container) and _may_act(snapshot, key, now):
            yield Kill(container)
    for key, removal in sorted(snapshot.removals.items()):
        yield from _end(snapshot, now, key, removal.stop_timeout_s, remove=True)
    for key in sorted(snapshot.fenced - snapshot.removals.keys()):
        yield from _end(snapshot, now, key, FENCE_TIMEOUT_S, remove=False)
    for key, assignment in sorted(snapshot.assignments.items()):
        if key in snapshot.removals or key in snapshot.fenced:
            continue
        if assignment.want == "stopped":
            yield from _end(snapshot, now, key, assignment.stop_timeout_s, remove=False)
        elif key in snapshot.work and not _may_begin(snapshot, assignment):
            yield from _cancel(key, snapshot.work[key])
    for key, work in sorted(snapshot.work.items(), key=itemgetter(0)):
        if key not in snapshot.assignments and key not in snapshot.removals:
            yield from _cancel(key, work)


def _releases(snapshot: AgentSnapshot, now: float) -> Iterator[Action]:
    for key, container in sorted(snapshot.unreleased.items(), key=itemgetter(0)):
        if _may_act(snapshot, key, now):
            in_use = _used_by_others(snapshot, key)
            unused = tuple(uuid for uuid in container.gpu_uuids if uuid not in in_use)
            still_used = tuple(uuid for uuid in container.gpu_uuids if uuid in in_use)
            yield Release(container, unused, still_used if container.share else ())


def _used_by_others(snapshot: AgentSnapshot, key: Key) -> set[str]:
    """The GPUs and MIG devices of live containers, and of work on other attempts."""
    live: list[HasDevices] = [one for one in snapshot.containers.values() if is_live(one)]
    other_work = [work for other, work in snapshot.work.items() if other != key]
    return claimed_uuids([*live, *other_work])


def _end(
    snapshot: AgentSnapshot, now: float, key: Key, stop_timeout_s: int, *, remove: bool
) -> Iterator[Action]:
    work, container = snapshot.work.get(key), snapshot.containers.get(key)
    if work is not None:
        yield from _cancel(key, work)
    elif container is None or container.status == "removing" or _is_paused(snapshot, key, now):
        return
    elif key in snapshot.unreleased or (key in snapshot.kill_reasons and is_live(container)):
        return  # the release or the kill comes first
    elif is_live(container):
        yield from _stop(snapshot, now, key, container, stop_timeout_s)
    elif remove or container.status == "created":  # a container that never ran has no logs to keep
        yield Remove(container)


def _stop(
    snapshot: AgentSnapshot, now: float, key: Key, container: Container, timeout_s: int
) -> Iterator[Action]:
    """Stop, or kill when the timeout is over. A changed timeout applies to a stop in progress too."""
    since = snapshot.stop_sent_at.get(key)
    if timeout_s <= 0 or (since is not None and now >= since + timeout_s):
        yield Kill(container)
    elif since is None:
        yield Stop(container)


def _cancel(key: Key, work: Work) -> Iterator[Action]:
    if work.kind is ActionKind.START and not work.cancelled:
        yield Cancel(key)


def _may_act(snapshot: AgentSnapshot, key: Key, now: float) -> bool:
    return key not in snapshot.work and not _is_paused(snapshot, key, now)


def _is_paused(snapshot: AgentSnapshot, key: Key, now: float) -> bool:
    pause = snapshot.pauses.get(key)
    return pause is not None and now < pause.until


class _StartPlanner:
    """Collects starts and restarts. Each claims its devices before the next assignment is considered."""

    def __init__(self, snapshot: AgentSnapshot, now: float) -> None:
        self.actions: list[Action] = []
        self.waiting: dict[Key, Reason] = {}
        self.restarts: dict[Key, PlannedRestart] = {}
        self._snapshot, self._now = snapshot, now
        self._chosen: dict[str, Key] = {}  # the attempt that starts or is being started, by instance
        self._claims = ClaimTable()
        self._present = _present(snapshot)

    def consider(self, key: Key, assignment: Assignment) -> None:
        snapshot = self._snapshot
        if key in snapshot.removals or key in snapshot.fenced or assignment.want != "running":
            return
        if key in snapshot.restarts:
            self.restarts[key] = snapshot.restarts[key]
        if key in snapshot.work:
            self._claim(key, [devices_of(assignment)])
            return
        container = snapshot.containers.get(key)
        if container is not None and key not in snapshot.kill_reasons and will_restart(assignment, container):
            self._restart(key, assignment, container)
        elif self._may_start(key, assignment, container):
            self._add(key, _devices(assignment, container), Start(assignment))

    def _may_start(self, key: Key, assignment: Assignment, container: Container | None) -> bool:
        if not assignment.may_start:
            return False
        if container is None:
            return key not in self._snapshot.began and key not in self._snapshot.refusals
        return container.status == "created"

    def _restart(self, key: Key, assignment: Assignment, container: Container) -> None:
        planned = _restart_after(container, self._snapshot.restarts.get(key), self._now)
        self.restarts[key] = planned
        if self._now >= planned.due:
            self._add(key, _devices(assignment, container), Restart(container))

    def _add(self, key: Key, devices: list[HasDevices], action: Start | Restart) -> None:
        if obstacle := self._obstacle(key, devices):
            self.waiting[key] = obstacle
        else:
            self.actions.append(action)
            self._claim(key, devices)

    def _claim(self, key: Key, devices: Sequence[HasDevices]) -> None:
        self._chosen.setdefault(key[0], key)
        for each in devices:
            self._claims.add(key, each)

    def _obstacle(self, key: Key, devices: Sequence[HasDevices]) -> Reason | None:
        if self._snapshot.problem is not None:
            return self._snapshot.problem
        if not _may_begin(self._snapshot, self._snapshot.assignments[key]):
            return NO_CONTACT
        if _is_paused(self._snapshot, key, self._now):
            return self._snapshot.pauses[key].reason
        instance_id, attempt = key
        chosen = self._chosen.get(instance_id, key)
        for other in (*self._present.attempts.get(instance_id, ()), chosen):
            if other != key:
                return _waiting(f"attempt {attempt} waits until attempt {other[1]} is gone from the node")
        for each in devices:
            if uuid := self._claims.conflict(key, each) or self._present.claims.conflict(key, each):
                return _waiting(f"{uuid} is still in use by another instance")
        return None


def _devices(assignment: Assignment, container: Container | None) -> list[HasDevices]:
    """An existing container keeps the devices it was created with, so these must be free too."""
    return [devices_of(assignment), *([container] if container else [])]


def _waiting(message: str) -> Reason:
    return Reason(code="waiting_for_removal", message=message)


@dataclass(frozen=True, slots=True)
class _Present:
    """The attempts and claims on the node, including those of work in progress."""

    attempts: Mapping[str, list[Key]]
    claims: ClaimTable


def _present(snapshot: AgentSnapshot) -> _Present:
    attempts: dict[str, list[Key]] = {}
    table = ClaimTable()
    for key in {**snapshot.containers, **snapshot.work, **snapshot.unreleased}:
        attempts.setdefault(key[0], []).append(key)
    for key, container in snapshot.unreleased.items():
        table.add(key, _unreleased_devices(snapshot, key, container))
    for key, container in snapshot.containers.items():
        if is_live(container):
            table.add(key, container)
    for key, work in snapshot.work.items():
        table.add(key, work)
    return _Present(attempts, table)


def _unreleased_devices(snapshot: AgentSnapshot, key: Key, container: Container) -> HasDevices:
    """The last share of a GPU claims the whole GPU: a new process would keep it from becoming idle."""
    if container.share is None or _used_by_others(snapshot, key).intersection(container.gpu_uuids):
        return container
    return Devices(container.gpu_uuids)


def _restart_after(container: Container, before: PlannedRestart | None, now: float) -> PlannedRestart:
    """The restart planned for this exit. Pauses double up to `LONGEST_PAUSE_S` until a run is steady."""
    if before is not None and before.finished_at == container.finished_at:
        return before
    tries = 0 if before is None or ran_s(container) >= STEADY_AFTER_S else before.tries + 1
    pause_s = int(backoff_s(tries, 1, LONGEST_PAUSE_S))
    return PlannedRestart(container.finished_at, tries, pause_s, now + pause_s)


def ran_s(container: Container) -> float:
    """How long the container ran, in seconds by the engine's clock; 0: unknown."""
    try:
        began = datetime.fromisoformat(container.started_at or "")
        return (datetime.fromisoformat(container.finished_at or "") - began).total_seconds()
    except (ValueError, TypeError):  # TypeError: one time with a zone and one without
        return 0


def _next_due(snapshot: AgentSnapshot, now: float, restarts: Mapping[Key, PlannedRestart]) -> float | None:
    times = [pause.until for pause in snapshot.pauses.values()]
    times += [planned.due for planned in restarts.values()]
    for key, since in snapshot.stop_sent_at.items():
        ending = snapshot.removals.get(key) or snapshot.assignments.get(key)
        if key in snapshot.fenced and key not in snapshot.removals:
            times.append(since + FENCE_TIMEOUT_S)
        elif ending is not None:
            times.append(since + ending.stop_timeout_s)
    return min((time for time in times if time > now), default=None)
