"""All that the agent knows of its instances, and how each event changes it. Used by one thread at a time.

answers ──apply_answer───┐                ┌──plan────────────> actions, which become work
listings ─apply_listing──┼──> AgentState ─┤
results ──started, …─────┘                └──reported_state──> the next report
"""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from mooring.agent.decide import reconcile, report
from mooring.agent.decide.device_claims import Share, claimed_uuids
from mooring.agent.decide.reconcile import ENDED, ReconcilePlan, is_live, key_of
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, Pause, PlannedRestart, Work
from mooring.agent.runtime import DELAY_LIMIT_S, Container, StartDelayed
from mooring.core.backoff import backoff_s
from mooring.schemas.agent import Assignment, ObservedInstance, Removal, SyncAnswer
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import Reason

LONGEST_RETRY_S: Final = 30
NEVER_RAN: Final = "created"

log = logging.getLogger(__name__)


class AnswerOutcome(Enum):
    """What the agent did with an answer."""

    APPLIED = "applied"
    OUTDATED = "outdated"  # a newer answer arrived first on the other connection; harmless
    REJECTED = "rejected"  # see `AgentState.rejection`; or the agent has ended


@dataclass(frozen=True, slots=True)
class ReportedState:
    """The part of a report about instances, and the generation of the desired state behind it."""

    generation: int = 0
    instances: list[ObservedInstance] | None = None
    orphans: list[Orphan] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """Work, and the event that cancels it."""

    work: Work
    cancel: threading.Event = field(default_factory=threading.Event)
    ended_at: int | None = None  # the number of the change that ended the work, if no listing shows it yet


class AgentState:
    """In memory only: the caller saves the highest generation ever seen and the times of stop signals.

    Args:
        stop_sent_at: when containers were sent their stop signal, by container id, from an earlier agent.
    """

    def __init__(
        self, control_plane_id: str, highest_generation: int, stop_sent_at: Mapping[str, float] | None = None
    ) -> None:
        self.control_plane_id = control_plane_id
        self.highest_generation = highest_generation
        self.generation = 0  # of the newest answer applied in this session
        self.rejection: Reason | None = None  # why the last answer was rejected
        self.problem: Reason | None = None  # why nothing may be started on this node
        self.containers: dict[Key, Container] | None = None  # None: the engine does not answer
        self._foreign_containers: list[Orphan] = []
        self._assignments: dict[Key, Assignment] = {}
        self._removals: dict[Key, Removal] = {}
        self._jobs: dict[Key, _Job] = {}
        self._progress: dict[Key, Reason] = {}  # of starts in progress
        self._refusals: dict[Key, Reason] = {}  # of starts that failed for good
        self._began: set[Key] = set()  # have run, and are not started again
        self._pauses: dict[Key, Pause] = {}
        self._restarts: dict[Key, PlannedRestart] = {}
        self._waiting: dict[Key, Reason] = {}  # why a wanted start does not happen now
        self._gpu_containers: dict[Key, Container] = {}  # until their GPUs are idle
        self._released: set[Key] = set()  # ended, and their GPUs are idle or reported
        self._kill_reasons: dict[Key, Reason] = {}
        self._fenced: set[Key] = set()  # stopped without contact; until their containers are gone
        self._has_contact = True
        self._stop_sent_at = dict(stop_sent_at or {})
        self._live_before_outage: set[Key] = set()
        self._killed_by_engine: set[Key] = set()
        # Every change by work is numbered, so that a listing that began before the change cannot undo it.
        self._changes = 0
        self._unlisted: dict[Key, tuple[int, Container | None]] = {}  # changes that no listing shows yet

    # --- the control plane's answers

    def apply_answer(self, answer: SyncAnswer, highest_when_asked: int) -> AnswerOutcome:
        """Apply the desired state, unless it is another control plane's or older than one seen before."""
        if answer.control_plane_id != self.control_plane_id:
            return self._reject(
                "foreign_control_plane",
                f"the server is control plane {answer.control_plane_id}, but this node joined "
                f"{self.control_plane_id}: its answers are ignored",
            )
        if answer.generation < highest_when_asked:
            return self._reject(
                "generation_regressed",
                f"the control plane went back to generation {answer.generation}, but this node has seen "
                f"{self.highest_generation}: its answers are ignored until it has caught up",
            )
        if answer.generation < self.highest_generation:
            return AnswerOutcome.OUTDATED
        if not answer.brief:
            self._apply(answer)
        return AnswerOutcome.APPLIED

    def _reject(self, code: str, message: str) -> AnswerOutcome:
        if self.rejection is None:
            log.error("%s: %s", code, message)
        self.rejection = Reason(code=code, message=message)
        return AnswerOutcome.REJECTED

    def _apply(self, answer: SyncAnswer) -> None:
        self.rejection = None
        self.highest_generation = self.generation = answer.generation
        self._assignments = {key_of(assignment): assignment for assignment in answer.assignments}
        self._removals = {key_of(removal): removal for removal in answer.removals}
        for by_key in (self._refusals, self._waiting, self._restarts):
            _keep_only(by_key, self._assignments)
        _keep_only(self._pauses, {*self._assignments, *self._removals})
        self._began &= {*self._assignments, *(self.containers or {})}

    def set_contact(self, *, has_contact: bool) -> None:
        """Without contact for too long, replaceable instances are stopped, and none is started."""
        self._has_contact = has_contact
        if not has_contact:
            self._fence()

    def _fence(self) -> None:
        for key, container in (self.containers or {}).items():
            if container.replaced_on_loss and is_live(container) and key not in self._fenced:
                log.error("%s/%s: stopping it, because there is no contact with the control plane", *key)
                self._fenced.add(key)

    # --- the engine's listings

    def begin_listing(self) -> int:
        """Call before asking the engine. Returns the number of the newest change, for `apply_listing`."""
        return self._changes

    def apply_listing(
        self, number: int, containers: Iterable[Container], foreign_containers: list[Orphan]
    ) -> bool:
        """Apply a listing. Returns whether another is needed, because work ended during this one."""
        seen = {key_of(container): container for container in containers}
        self._unlisted = {key: change for key, change in self._unlisted.items() if change[0] > number}
        for key, (_, container) in self._unlisted.items():
            _put(seen, key, container)
        self._note_engine_restart(seen)
        self.containers, self._foreign_containers = seen, foreign_containers
        self._released &= seen.keys()
        _keep_only(self._stop_sent_at, {one.container_id for one in seen.values() if is_live(one)})
        self._kill_reasons = {
            key: reason
            for key, reason in self._kill_reasons.items()
            if key in seen and not _ended_by_itself(seen[key])
        }
        self._fenced &= seen.keys()
        if not self._has_contact:
            self._fence()  # also what began while the engine did not answer
        for key, container in seen.items():
            self._note_gpu_container(key, container)
        self._began |= {key for key, container in seen.items() if container.status != NEVER_RAN}
        self._jobs = {
            key: job for key, job in self._jobs.items() if job.ended_at is None or job.ended_at > number
        }
        return bool(self._unlisted)

    def engine_unavailable(self) -> None:
        """The engine did not answer: what is on the node is unknown, and nothing is done until a listing."""
        if self.containers is not None:
            self._live_before_outage = {key for key, one in self.containers.items() if is_live(one)}
        self.containers = None

    def _note_gpu_container(self, key: Key, container: Container) -> None:
        if is_live(container):
            self._released.discard(key)
        if container.gpu_uuids and container.status != NEVER_RAN and key not in self._released:
            self._gpu_containers[key] = container

    def _unreleased(self) -> dict[Key, Container]:
        """Containers that ended or are gone, and whose GPUs may not be idle yet."""
        present = self.containers or {}
        newest = {key: present.get(key, container) for key, container in self._gpu_containers.items()}
        return {
            key: container
            for key, container in newest.items()
            if not (key in present and (is_live(container) or self._will_restart(key, container)))
        }

    def _will_restart(self, key: Key, container: Container) -> bool:
        assignment = self._assignments.get(key)
        return key not in self._kill_reasons and reconcile.will_restart(assignment, container)

    def gpus_in_use(self) -> set[str] | None:
        """The GPUs that an instance uses or may use; None: unknown."""
        if self.containers is None:
            return None
        return claimed_uuids([*self._gpu_containers.values(), *(job.work for job in self._jobs.values())])

    def _note_engine_restart(self, seen: dict[Key, Container]) -> None:
        """Note which containers dockerd killed (exit code 137) when it restarted without live-restore."""
        for key in self._live_before_outage & seen.keys():
            if seen[key].status in ENDED and seen[key].exit_code == report.SIGKILLED:
                self._killed_by_engine.add(key)
        self._live_before_outage = set()
        self._killed_by_engine &= {key for key, container in seen.items() if container.status in ENDED}

    # --- decisions

    def plan(self, now: float) -> ReconcilePlan | None:
        """What to do now; None while the desired or the observed state is unknown."""
        # An agent that was restarted without contact still stops what it must.
        if (not self.generation and self._has_contact) or self.containers is None:
            return None
        plan = reconcile.decide(self._snapshot(self.containers), now)
        self._restarts, self._waiting = dict(plan.restarts), dict(plan.waiting)
        return plan

    def begin_work(
        self,
        key: Key,
        kind: ActionKind,
        gpu_uuids: Iterable[str],
        *,
        parent_gpus: tuple[str, ...] = (),
        share: Share | None = None,
    ) -> threading.Event:
        """Note that work has begun. Returns the event that cancels it."""
        work = Work(kind, tuple(gpu_uuids), parent_gpus=parent_gpus, share=share)
        job = self._jobs[key] = _Job(work)
        return job.cancel

    def postpone(self, key: Key, reason: Reason) -> None:
        """A planned start has to wait. It is planned again when other work ends."""
        self._waiting[key] = reason

    def cancel(self, key: Key) -> None:
        job = self._jobs[key]
        job.work = replace(job.work, cancelled=True)
        job.cancel.set()

    def kill(self, key: Key, reason: Reason) -> None:
        """Plan to kill a live container, without a restart: it would have to be killed again."""
        container = (self.containers or {}).get(key)
        if container is not None and is_live(container):
            log.error("%s/%s: killing the container, %s: %s", *key, reason.code, reason.message)
            self._kill_reasons[key] = reason

    def watched_containers(self) -> list[Container]:
        """Live containers that have only a part of a GPU."""
        return [
            container
            for key, container in (self.containers or {}).items()
            if is_live(container)
            and (container.share or container.parent_gpus)
            and key not in self._kill_reasons
        ]

    # --- results of work

    def set_progress(self, key: Key, reason: Reason) -> None:
        if key in self._jobs:
            self._progress[key] = reason

    def started(self, key: Key, container: Container) -> None:
        self._began.add(key)
        self._succeeded(key, container)

    def stop_sent(self, key: Key, container_id: str, at: float) -> dict[str, float]:
        """The stop signal was sent, which ends this work: a listing or the timeout decides what follows.

        Returns:
            When each live container was sent its stop signal, by container id.
        """
        for by_key in (self._jobs, self._pauses):
            by_key.pop(key, None)
        self._stop_sent_at[container_id] = at
        return dict(self._stop_sent_at)

    def removed(self, key: Key) -> None:
        self._succeeded(key, None)

    def released(self, key: Key) -> None:
        """The GPUs of an ended container are idle, or reported as not idle."""
        for by_key in (self._jobs, self._gpu_containers, self._pauses):
            by_key.pop(key, None)
        self._released.add(key)

    def refused(self, key: Key, reason: Reason) -> None:
        """A start failed for good and left nothing."""
        self._refusals[key] = reason
        self._succeeded(key, None)

    def await_listing(self, key: Key) -> None:
        """Work succeeded; the next listing shows the result."""
        self._pauses.pop(key, None)
        self._end_job(key)

    def failed(self, key: Key, reason: Reason, now: float) -> None:
        """Work failed and is retried after a pause; the next listing shows the result."""
        tries = self._pauses[key].tries + 1 if key in self._pauses else 0
        until = now + backoff_s(tries, 1, LONGEST_RETRY_S)
        self._pauses[key] = Pause(tries, until, reason, self._failing_since(key, reason, now))
        self._end_job(key)

    def delayed(self, key: Key, delay: StartDelayed, now: float) -> None:
        """As `failed`, but the start fails for good if it has been delayed for too long."""
        delayed_s = now - self._failing_since(key, delay.reason, now)
        if delay.refusal is not None and delayed_s >= DELAY_LIMIT_S:
            self.refused(key, delay.refusal)
        else:
            self.failed(key, delay.reason, now)

    def _failing_since(self, key: Key, reason: Reason, now: float) -> float:
        pause = self._pauses.get(key)
        return pause.since if pause is not None and pause.reason.code == reason.code else now

    def _succeeded(self, key: Key, container: Container | None) -> None:
        for by_key in (self._jobs, self._progress, self._pauses):
            by_key.pop(key, None)
        self._changes += 1
        self._unlisted[key] = self._changes, container
        if self.containers is not None:
            _put(self.containers, key, container)
        if container is not None:
            self._note_gpu_container(key, container)

    def _end_job(self, key: Key) -> None:
        self._changes += 1
        self._jobs[key].ended_at = self._changes
        self._progress.pop(key, None)

    # --- reports

    def reported_state(self) -> ReportedState:
        if self.containers is None:
            return ReportedState(self.generation)
        snapshot = self._snapshot(self.containers)
        # Before the first answer it is not known which containers are orphans.
        orphans = report.orphans(snapshot, self.control_plane_id) if self.generation else []
        return ReportedState(
            self.generation, report.observed(snapshot), [*self._foreign_containers, *orphans]
        )

    def container(self, key: Key) -> Container | None:
        return (self.containers or {}).get(key)

    def _snapshot(self, containers: Mapping[Key, Container]) -> AgentSnapshot:
        stop_sent = self._stop_sent_at
        return AgentSnapshot(
            containers=containers,
            assignments=self._assignments,
            removals=self._removals,
            work={key: job.work for key, job in self._jobs.items()},
            progress=self._progress,
            waiting=self._waiting,
            refusals=self._refusals,
            began=self._began,
            pauses=self._pauses,
            restarts=self._restarts,
            unreleased=self._unreleased(),
            kill_reasons=self._kill_reasons,
            killed_by_engine=self._killed_by_engine,
            stop_sent_at={
                key: stop_sent[one.container_id]
                for key, one in containers.items()
                if one.container_id in stop_sent
            },
            fenced=self._fenced,
            has_contact=self._has_contact,
            problem=self.problem,
        )


def _keep_only(by_key: dict[Any, Any], keys: Collection[object]) -> None:
    for key in [key for key in by_key if key not in keys]:
        del by_key[key]


def _ended_by_itself(container: Container) -> bool:
    """Whether the container ended before the agent killed it."""
    return container.status in ENDED and container.exit_code != report.SIGKILLED


def _put(containers: dict[Key, Container], key: Key, container: Container | None) -> None:
    containers.pop(key, None)
    if container is not None:
        containers[key] = container
