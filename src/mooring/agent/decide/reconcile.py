"""What a node does next, decided from what it should have and what it has. No clock, no threads, no memory.

    absent --Start--> created --Start (adopts)--> running --Stop--> exited --Release--> --Remove--> absent
                                                     ^    Kill         |
                                                     `--Restart--------'  the user's policy, after a pause

A container that is neither assigned nor to be removed is never touched.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import itemgetter
from typing import Final

from mooring.agent.decide.device_claims import DeviceHolder, Devices, Had, Share, all_claimed, devices_of
from mooring.agent.runtime import Container
from mooring.core.instance import Reason
from mooring.schemas.agent import Assignment, OverlayNetwork, Removal

Key = tuple[str, int]  # instance id, attempt

ENDED: Final = frozenset({"exited", "dead"})
LONGEST_PAUSE_S: Final = 60
STEADY_AFTER_S: Final = 60  # a container that ran this long is restarted as if it had never failed


class Doing(StrEnum):
    START = "start"
    RESTART = "restart"
    STOP = "stop"
    RELEASE = "release"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Work:
    """An action under way, or one whose effect no listing has shown yet."""

    doing: Doing
    gpu_uuids: tuple[str, ...] = ()
    cancelled: bool = False
    cards: tuple[str, ...] = ()
    share: Share | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """An action failed because of the engine: not again before `until`."""

    tries: int
    until: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Restarts:
    """The exit that the next restart follows, how many came shortly before, and when it is due."""

    finished_at: str | None
    tries: int
    pause_s: int
    due: float


@dataclass(frozen=True, slots=True)
class ReconcileInput:
    """Everything a decision depends on."""

    assignments: Mapping[Key, Assignment]
    removals: Mapping[Key, Removal]
    containers: Mapping[Key, Container]
    work: Mapping[Key, Work]
    now: float
    spent: Set[Key] = frozenset()  # has run, or was refused: an absent container stays absent
    pauses: Mapping[Key, Pause] = field(default_factory=dict)
    restarts: Mapping[Key, Restarts] = field(default_factory=dict)
    unreleased: Mapping[Key, Container] = field(
        default_factory=dict
    )  # ended or gone, and their cards not free
    problem: Reason | None = None  # why nothing may be started on this node
    expelled: Set[Key] = frozenset()  # may not go on: they harm others, or have lost what they were given
    stopping: Mapping[Key, float] = field(default_factory=dict)  # since when: they have their stop signal


@dataclass(frozen=True, slots=True)
class Start:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a start that is under way."""

    key: Key


@dataclass(frozen=True, slots=True)
class Restart:
    container: Container


@dataclass(frozen=True, slots=True)
class Stop:
    """Send the stop signal; the timeout runs from then on, and nothing waits for it but time."""

    container: Container


@dataclass(frozen=True, slots=True)
class Kill:
    """At once: its time is over, or its neighbours fail meanwhile."""

    container: Container


@dataclass(frozen=True, slots=True)
class Release:
    """See that the cards of a container that has ended are idle (R11), but for those that others have.

    `beside` is the card that it shared with those who go on: only its own processes must be gone from it.
    """

    container: Container
    gpu_uuids: tuple[str, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remove:
    container: Container


Action = Start | Cancel | Restart | Stop | Kill | Release | Remove


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    actions: tuple[Action, ...]
    waiting: Mapping[Key, Reason]  # why a wanted start does not happen now
    restarts: Mapping[Key, Restarts]
    due: float | None  # when time alone will make another plan


@dataclass(frozen=True, slots=True)
class OverlayChanges:
    create: tuple[OverlayNetwork, ...]
    remove: tuple[str, ...]


def overlay_changes(wanted: Iterable[OverlayNetwork], present: Iterable[str]) -> OverlayChanges:
    """What a manager of a swarm makes and removes, so that its groups have their networks.

    Args:
        present: the names of those that carry our labels, and so of no others.
    """
    named, there = {overlay.name: overlay for overlay in wanted}, set(present)
    missing = tuple(overlay for name, overlay in sorted(named.items()) if name not in there)
    return OverlayChanges(missing, tuple(sorted(there - named.keys())))


def decide(world: ReconcileInput) -> ReconcilePlan:
    """What to do now. Endings come first: a start may need what they let go of, at the next decision."""
    endings = tuple(_endings(world))
    beginnings = _Beginnings(world)
    for key in sorted(world.assignments, key=_newest_attempt_first):
        beginnings.consider(key, world.assignments[key])
    return ReconcilePlan(
        (*endings, *beginnings.actions),
        beginnings.waiting,
        beginnings.restarts,
        _next_due(world, beginnings.restarts),
    )


def key_of(thing: Assignment | Removal | Container) -> Key:
    return thing.instance_id, thing.attempt


def is_live(container: Container) -> bool:
    """Whether it may hold GPUs: anything but a container that never began or has ended."""
    return container.status != "created" and container.status not in ENDED


def will_restart(assignment: Assignment | None, container: Container) -> bool:
    """Whether the user's policy asks to start this exited container again."""
    if assignment is None or assignment.want != "running" or container.status not in ENDED:
        return False
    policy = assignment.spec.restart
    return policy == "always" or (policy == "on_failure" and container.exit_code != 0)


def _newest_attempt_first(key: Key) -> tuple[str, int]:
    instance_id, attempt = key
    return instance_id, -attempt


def _endings(world: ReconcileInput) -> Iterator[Action]:
    yield from _releases(world)
    for key in sorted(world.expelled):
        container = world.containers.get(key)
        if container is not None and is_live(container) and key not in world.work and not _paused(world, key):
            yield Kill(container)
    for key, removal in sorted(world.removals.items()):
        yield from _end(world, key, removal.stop_timeout_s, remove=True)
    for key, assignment in sorted(world.assignments.items()):
        if assignment.want == "stopped" and key not in world.removals:
            yield from _end(world, key, assignment.stop_timeout_s, remove=False)
    for key, work in sorted(world.work.items(), key=itemgetter(0)):
        if key not in world.assignments and key not in world.removals:
            yield from _cancel(key, work)


def _releases(world: ReconcileInput) -> Iterator[Action]:
    for key, container in sorted(world.unreleased.items(), key=itemgetter(0)):
        if key not in world.work and not _paused(world, key):
            others = _had_by_others(world, key)
            theirs = tuple(uuid for uuid in container.gpu_uuids if uuid in others)
            alone = tuple(uuid for uuid in container.gpu_uuids if uuid not in others)
            yield Release(container, alone, theirs if container.share else ())


def _had_by_others(world: ReconcileInput, key: Key) -> set[str]:
    """Cards and MIG devices that somebody uses or begins to use; who has ended, too, only lets go."""
    live: list[DeviceHolder] = [one for one in world.containers.values() if is_live(one)]
    working = [work for other, work in world.work.items() if other != key]
    return all_claimed([*live, *working])


def _end(world: ReconcileInput, key: Key, stop_timeout_s: int, *, remove: bool) -> Iterator[Action]:
    work, container = world.work.get(key), world.containers.get(key)
    if work is not None:
        yield from _cancel(key, work)
    elif container is None or container.status == "removing" or _paused(world, key):
        return
    elif key in world.unreleased or (key in world.expelled and is_live(container)):
        return  # one thing after the other
    elif is_live(container):
        yield from _stop(world, key, container, stop_timeout_s)
    elif remove or container.status == "created":  # one that never ran has no logs worth keeping
        yield Remove(container)


def _stop(world: ReconcileInput, key: Key, container: Container, timeout_s: int) -> Iterator[Action]:
    """The timeout is the newest that was asked for: a shorter one holds for a stop that is under way."""
    since = world.stopping.get(key)
    if timeout_s <= 0 or (since is not None and world.now >= since + timeout_s):
        yield Kill(container)
    elif since is None:
        yield Stop(container)


def _cancel(key: Key, work: Work) -> Iterator[Action]:
    if work.doing is Doing.START and not work.cancelled:
        yield Cancel(key)


def _paused(world: ReconcileInput, key: Key) -> bool:
    pause = world.pauses.get(key)
    return pause is not None and world.now < pause.until


class _Beginnings:
    """Collects starts and restarts, and what the ones already chosen will hold."""

    def __init__(self, world: ReconcileInput) -> None:
        self.actions: list[Action] = []
        self.waiting: dict[Key, Reason] = {}
        self.restarts: dict[Key, Restarts] = {}
        self._world = world
        self._attempts: dict[str, Key] = {}
        self._had = Had()
        self._present = _present(world)

    def consider(self, key: Key, assignment: Assignment) -> None:
        if key in self._world.removals or assignment.want != "running":
            return
        if key in self._world.restarts:
            self.restarts[key] = self._world.restarts[key]
        if key in self._world.work:
            self._hold(key, [devices_of(assignment)])
            return
        container = self._world.containers.get(key)
        if container is not None and key not in self._world.expelled and will_restart(assignment, container):
            self._restart(key, assignment, container)
        elif self._may_start(key, assignment, container):
            self._begin(key, _devices(assignment, container), Start(assignment))

    def _may_start(self, key: Key, assignment: Assignment, container: Container | None) -> bool:
        if not assignment.may_start:
            return False
        if container is None:
            return key not in self._world.spent
        return container.status == "created"

    def _restart(self, key: Key, assignment: Assignment, container: Container) -> None:
        planned = _restart_after(container, self._world.restarts.get(key), self._world.now)
        self.restarts[key] = planned
        if self._world.now >= planned.due:
            self._begin(key, _devices(assignment, container), Restart(container))

    def _begin(self, key: Key, devices: list[DeviceHolder], action: Start | Restart) -> None:
        if obstacle := self._obstacle(key, devices):
            self.waiting[key] = obstacle
        else:
            self.actions.append(action)
            self._hold(key, devices)

    def _hold(self, key: Key, devices: Sequence[DeviceHolder]) -> None:
        self._attempts.setdefault(key[0], key)
        for each in devices:
            self._had.note(key, each)

    def _obstacle(self, key: Key, devices: Sequence[DeviceHolder]) -> Reason | None:
        if self._world.problem is not None:
            return self._world.problem
        if _paused(self._world, key):
            return self._world.pauses[key].reason
        instance_id, attempt = key
        for other in (*self._present.attempts.get(instance_id, ()), self._attempts.get(instance_id, key)):
            if other != key:
                return _waits(f"attempt {attempt} waits until attempt {other[1]} is gone from the node")
        for each in devices:
            if uuid := self._had.in_the_way(key, each) or self._present.had.in_the_way(key, each):
                return _waits(f"{uuid} is still held by a container that is being removed")
        return None


def _devices(assignment: Assignment, container: Container | None) -> list[DeviceHolder]:
    """A container that is there gets the cards it was made with, whatever its assignment says by now."""
    return [devices_of(assignment), *([container] if container else [])]


def _waits(message: str) -> Reason:
    return Reason(code="waiting_for_removal", message=message)


@dataclass(frozen=True, slots=True)
class _Present:
    """What is on the node, or may come to be there by work under way."""

    attempts: Mapping[str, list[Key]]
    had: Had


def _present(world: ReconcileInput) -> _Present:
    attempts: dict[str, list[Key]] = {}
    had = Had()
    for key in {**world.containers, **world.work, **world.unreleased}:
        attempts.setdefault(key[0], []).append(key)
    for key, container in world.unreleased.items():
        had.note(key, _let_go_of(world, key, container))
    for key, container in world.containers.items():
        if is_live(container):
            had.note(key, container)
    for key, work in world.work.items():
        had.note(key, work)
    return _Present(attempts, had)


def _let_go_of(world: ReconcileInput, key: Key, container: Container) -> DeviceHolder:
    """A card that nobody else uses is looked at as a whole: whoever came now would be in the way of that."""
    if container.share is None or _had_by_others(world, key).intersection(container.gpu_uuids):
        return container
    return Devices(container.gpu_uuids)


def _restart_after(container: Container, before: Restarts | None, now: float) -> Restarts:
    """The same plan as before while the exit is the same one, else a longer pause."""
    if before is not None and before.finished_at == container.finished_at:
        return before
    tries = 0 if before is None or ran_s(container) >= STEADY_AFTER_S else before.tries + 1
    pause_s = LONGEST_PAUSE_S if tries >= 6 else 2**tries
    return Restarts(container.finished_at, tries, pause_s, now + pause_s)


def ran_s(container: Container) -> float:
    """How long it ran, by the engine's clock; 0 if that cannot be told."""
    try:
        began = datetime.fromisoformat(container.started_at or "")
        return (datetime.fromisoformat(container.finished_at or "") - began).total_seconds()
    except (ValueError, TypeError):  # TypeError: one time with a zone and one without
        return 0


def _next_due(world: ReconcileInput, restarts: Mapping[Key, Restarts]) -> float | None:
    times = [pause.until for pause in world.pauses.values()] + [planned.due for planned in restarts.values()]
    for key, since in world.stopping.items():
        ending = world.removals.get(key) or world.assignments.get(key)
        if ending is not None:
            times.append(since + ending.stop_timeout_s)
    return min((time for time in times if time > world.now), default=None)
