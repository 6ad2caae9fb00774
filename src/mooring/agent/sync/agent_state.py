"""All that an agent knows of its instances, and how each piece of news changes it. One thread at a time.

answers ──hear──┐                         ┌──plan──> actions, which become work
listings ─listed┼──> Knowledge ───────────┤
work ──ended────┘                         └──picture──> the next report
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from mooring.agent.decide import reconcile, report
from mooring.agent.decide.device_claims import Share, all_claimed
from mooring.agent.decide.reconcile import ENDED, Doing, Key, Pause, ReconcilePlan, Restarts, Work, key_of
from mooring.agent.runtime import Container
from mooring.core.instance import Reason
from mooring.schemas.agent import Assignment, ObservedInstance, Orphan, Removal, SyncAnswer

LONGEST_RETRY_S: Final = 30
NEVER_RAN: Final = "created"

log = logging.getLogger(__name__)


class AnswerOutcome(Enum):
    """What became of an answer."""

    TAKEN = "taken"
    LATE = "late"  # overtaken by a newer one on the other connection; no harm
    REFUSED = "refused"  # not obeyed: see `AgentState.mistrust`


@dataclass(frozen=True, slots=True)
class Picture:
    """What a report says of instances, and the desired state it was made under."""

    generation: int = 0
    instances: list[ObservedInstance] | None = None
    orphans: list[Orphan] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """Work, and the flag its thread watches. `over_at`: it ended, but no later listing has come yet."""

    work: Work
    cancel: threading.Event = field(default_factory=threading.Event)
    over_at: int | None = None


class AgentState:
    """`highest` is the newest generation ever seen; the caller keeps it on disk, and `stopping` too.

    Args:
        stopping: when a container was sent its stop signal, by its id, as an agent of before left it.
    """

    def __init__(
        self, control_plane_id: str, highest: int, stopping: Mapping[str, float] | None = None
    ) -> None:
        self.control_plane_id = control_plane_id
        self.highest = highest
        self.generation = 0  # of what was heard in this session
        self.mistrust: Reason | None = None  # why the last answer was refused
        self.problem: Reason | None = None  # why nothing may be started on this node
        self.containers: dict[Key, Container] | None = None  # None: the engine does not answer
        self._strangers: list[Orphan] = []
        self._assignments: dict[Key, Assignment] = {}
        self._removals: dict[Key, Removal] = {}
        self._jobs: dict[Key, _Job] = {}
        self._progress: dict[Key, Reason] = {}
        self._refusals: dict[Key, Reason] = {}
        self._began: set[Key] = set()
        self._pauses: dict[Key, Pause] = {}
        self._restarts: dict[Key, Restarts] = {}
        self._waiting: dict[Key, Reason] = {}
        self._holders: dict[Key, Container] = {}  # of cards, until those are seen to be idle
        self._released: set[Key] = set()  # ended, and seen to
        self._expelled: dict[Key, Reason] = {}  # whom the watchdog ends, until nothing of them is left
        self._stopping = dict(stopping or {})
        self._ran_when_engine_left: set[Key] = set()
        self._engine_ended: set[Key] = set()
        # Every change that work makes is numbered, so that a listing begun before it cannot undo it.
        self._changes = 0
        self._unlisted: dict[Key, tuple[int, Container | None]] = {}

    # --- the control plane's answers

    def hear(self, answer: SyncAnswer, highest_when_asked: int) -> AnswerOutcome:
        """Take in what the node should have, unless it comes from a stranger or from the past."""
        if answer.control_plane_id != self.control_plane_id:
            return self._refuse(
                "foreign_control_plane",
                f"the server is control plane {answer.control_plane_id}, and this node joined "
                f"{self.control_plane_id}: its answers are not obeyed",
            )
        if answer.generation < highest_when_asked:
            return self._refuse(
                "generation_regressed",
                f"the control plane went back to generation {answer.generation}, and this node has seen "
                f"{self.highest}: nothing is changed here until it has caught up",
            )
        if answer.generation < self.highest:
            return AnswerOutcome.LATE
        if not answer.brief:
            self._take(answer)
        return AnswerOutcome.TAKEN

    def _refuse(self, code: str, message: str) -> AnswerOutcome:
        if self.mistrust is None:
            log.error("%s: %s", code, message)
        self.mistrust = Reason(code=code, message=message)
        return AnswerOutcome.REFUSED

    def _take(self, answer: SyncAnswer) -> None:
        self.mistrust = None
        self.highest = self.generation = answer.generation
        self._assignments = {key_of(assignment): assignment for assignment in answer.assignments}
        self._removals = {key_of(removal): removal for removal in answer.removals}
        for notes in (self._refusals, self._waiting, self._restarts):
            _forget_others(notes, self._assignments)
        _forget_others(self._pauses, {**self._assignments, **self._removals})
        self._began &= {*self._assignments, *(self.containers or {})}

    # --- the engine's listings

    def begin_listing(self) -> int:
        """To be called before the engine is asked; its number goes to `listed`."""
        return self._changes

    def listed(self, number: int, containers: Iterable[Container], strangers: list[Orphan]) -> bool:
        """Take in a listing; whether another is needed, because work ended while it was made."""
        seen = {key_of(container): container for container in containers}
        self._unlisted = {key: change for key, change in self._unlisted.items() if change[0] > number}
        for key, (_, container) in self._unlisted.items():
            _put(seen, key, container)
        self._note_engine_restart(seen)
        self.containers, self._strangers = seen, strangers
        self._released &= seen.keys()
        live = {one.container_id for one in seen.values() if reconcile.is_live(one)}
        self._stopping = {one: since for one, since in self._stopping.items() if one in live}
        self._expelled = {
            key: reason
            for key, reason in self._expelled.items()
            if key in seen and not _ended_itself(seen[key])
        }
        for key, container in seen.items():
            self._note_holder(key, container)
        self._began |= {key for key, container in seen.items() if container.status != NEVER_RAN}
        self._jobs = {
            key: job for key, job in self._jobs.items() if job.over_at is None or job.over_at > number
        }
        return bool(self._unlisted)

    def unlisted(self) -> None:
        """The engine did not answer: everything is unknown, and nothing is decided until it does."""
        if self.containers is not None:
            live = {key for key, container in self.containers.items() if reconcile.is_live(container)}
            self._ran_when_engine_left = live
        self.containers = None

    def _note_holder(self, key: Key, container: Container) -> None:
        if reconcile.is_live(container):
            self._released.discard(key)
        if container.gpu_uuids and container.status != NEVER_RAN and key not in self._released:
            self._holders[key] = container

    def _unreleased(self) -> dict[Key, Container]:
        """Those that ended or went away, and whose cards may not be idle yet."""
        there = self.containers or {}
        now = {key: there.get(key, container) for key, container in self._holders.items()}
        return {
            key: container
            for key, container in now.items()
            if not (key in there and reconcile.is_live(container))
            and not (key in there and self._will_restart(key, container))
        }

    def _will_restart(self, key: Key, container: Container) -> bool:
        return key not in self._expelled and reconcile.will_restart(self._assignments.get(key), container)

    def gpus_in_use(self) -> set[str] | None:
        """The cards that an instance has, or may have; None: unknown."""
        if self.containers is None:
            return None
        return all_claimed([*self._holders.values(), *(job.work for job in self._jobs.values())])

    def _note_engine_restart(self, seen: dict[Key, Container]) -> None:
        """Dockerd without live-restore kills what ran, with 137, when it comes back."""
        for key in self._ran_when_engine_left & seen.keys():
            if seen[key].status in ENDED and seen[key].exit_code == report.SIGKILLED:
                self._engine_ended.add(key)
        self._ran_when_engine_left = set()
        self._engine_ended &= {key for key, container in seen.items() if container.status in ENDED}

    # --- decisions

    def plan(self, now: float) -> ReconcilePlan | None:
        """What to do now, or None while the desired or the present state is unknown."""
        if not self.generation or self.containers is None:
            return None
        plan = reconcile.decide(
            reconcile.ReconcileInput(
                assignments=self._assignments,
                removals=self._removals,
                containers=self.containers,
                work=self._work(),
                now=now,
                spent=self._refusals.keys() | self._began,
                pauses=self._pauses,
                restarts=self._restarts,
                unreleased=self._unreleased(),
                problem=self.problem,
                expelled=self._expelled.keys(),
                stopping={
                    key: self._stopping[container.container_id]
                    for key, container in self.containers.items()
                    if container.container_id in self._stopping
                },
            )
        )
        self._restarts, self._waiting = dict(plan.restarts), dict(plan.waiting)
        return plan

    def begin(
        self,
        key: Key,
        doing: Doing,
        gpu_uuids: Iterable[str],
        *,
        cards: tuple[str, ...] = (),
        share: Share | None = None,
    ) -> threading.Event:
        """Note that work has begun; the event tells its thread to give up."""
        job = self._jobs[key] = _Job(Work(doing, tuple(gpu_uuids), cards=cards, share=share))
        return job.cancel

    def hold_back(self, key: Key, reason: Reason) -> None:
        """A start that was decided and has to wait; it is decided again when other work ends."""
        self._waiting[key] = reason

    def cancel(self, key: Key) -> None:
        job = self._jobs[key]
        job.work = replace(job.work, cancelled=True)
        job.cancel.set()

    def expel(self, key: Key, reason: Reason) -> None:
        """This one may not go on. Its own policy does not start it again: it would do the same again."""
        container = (self.containers or {}).get(key)
        if container is not None and reconcile.is_live(container):
            log.error("%s/%s is ended, %s: %s", *key, reason.code, reason.message)
            self._expelled[key] = reason

    def watched(self) -> list[Container]:
        """Running containers that have a part of a card only."""
        live = filter(reconcile.is_live, (self.containers or {}).values())
        return [
            container
            for container in live
            if (container.share or container.cards) and key_of(container) not in self._expelled
        ]

    # --- what became of work

    def progressed(self, key: Key, reason: Reason) -> None:
        if key in self._jobs:
            self._progress[key] = reason

    def started(self, key: Key, container: Container) -> None:
        self._began.add(key)
        self._succeeded(key, container)

    def stop_begun(self, key: Key, container_id: str, since: float) -> dict[str, float]:
        """It has its stop signal. Nothing is under way any more: its end will show, or its time be over.

        Returns:
            When each container that still runs was sent its stop signal, by its id.
        """
        for notes in (self._jobs, self._pauses):
            notes.pop(key, None)
        self._stopping[container_id] = since
        return dict(self._stopping)

    def removed(self, key: Key) -> None:
        self._succeeded(key, None)

    def released(self, key: Key) -> None:
        """Its cards are idle, or reported not to be."""
        for notes in (self._jobs, self._holders, self._pauses):
            notes.pop(key, None)
        self._released.add(key)

    def refused(self, key: Key, reason: Reason) -> None:
        """A start that failed for good, and left nothing."""
        self._refusals[key] = reason
        self._succeeded(key, None)

    def settling(self, key: Key) -> None:
        """It ended well, and only a listing will tell what there is now."""
        self._pauses.pop(key, None)
        self._over(key)

    def failed(self, key: Key, reason: Reason, now: float) -> None:
        """It failed because of the engine, or of us: what there is now is for a listing to say."""
        tries = self._pauses[key].tries + 1 if key in self._pauses else 0
        until = now + min(LONGEST_RETRY_S, 2.0**tries)
        self._pauses[key] = Pause(tries, until, reason)
        self._over(key)

    def _succeeded(self, key: Key, container: Container | None) -> None:
        for notes in (self._jobs, self._progress, self._pauses):
            notes.pop(key, None)
        self._changes += 1
        self._unlisted[key] = self._changes, container
        if self.containers is not None:
            _put(self.containers, key, container)
        if container is not None:
            self._note_holder(key, container)

    def _over(self, key: Key) -> None:
        self._changes += 1
        self._jobs[key].over_at = self._changes
        self._progress.pop(key, None)

    # --- reports

    def picture(self) -> Picture:
        if self.containers is None:
            return Picture(self.generation)
        known = report.Known(
            containers=self.containers,
            assignments=self._assignments,
            removals=self._removals,
            work=self._work(),
            progress=self._progress,
            waiting=self._waiting,
            refusals=self._refusals,
            restarts=self._restarts,
            unreleased=self._unreleased(),
            engine_ended=self._engine_ended,
            expelled=self._expelled,
        )
        # Before the first answer nothing can be told to be an orphan.
        ours = report.orphans(known, self.control_plane_id) if self.generation else []
        return Picture(self.generation, report.observed(known), [*self._strangers, *ours])

    def container(self, key: Key) -> Container | None:
        return (self.containers or {}).get(key)

    def _work(self) -> dict[Key, Work]:
        return {key: job.work for key, job in self._jobs.items()}


def _forget_others(notes: dict[Key, Any], kept: Mapping[Key, object]) -> None:
    for key in [key for key in notes if key not in kept]:
        del notes[key]


def _ended_itself(container: Container) -> bool:
    """Before it could be killed."""
    return container.status in ENDED and container.exit_code != report.SIGKILLED


def _put(containers: dict[Key, Container], key: Key, container: Container | None) -> None:
    containers.pop(key, None)
    if container is not None:
        containers[key] = container
