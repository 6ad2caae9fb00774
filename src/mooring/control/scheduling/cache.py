"""All that the scheduler sees, kept up to date in memory for everybody in this process."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy.orm import Session

from mooring.control.scheduling import quotas, usage
from mooring.control.scheduling.evaluation import Evaluation
from mooring.control.scheduling.node_views import NodeViews
from mooring.control.scheduling.pending import Pending
from mooring.db.types import now
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import NodeView, Policy, SchedulingPlan, Snapshot


class SchedulerCache:
    """Made once for a process; whoever looks brings it up to date."""

    def __init__(self, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy or Policy()
        self._nodes = NodeViews(clock)
        self._pending = Pending()
        self._lock = threading.Lock()
        self._decided: Decided | None = None
        self.evaluating_lock = threading.Lock()
        self._memory = CycleCache()
        self._forecast_memory = CycleCache()
        self._evaluation: Evaluation | None = None
        self._placing_at_once = threading.Lock()
        self._placing_memory = CycleCache()

    def look(self, session: Session) -> tuple[NodeView, ...]:
        """Every node as this transaction sees it, by id; one that has not changed is the same object."""
        return self._nodes.look(session)

    def doubt(self, node_ids: Iterable[str]) -> None:
        """Read these nodes anew at the next look: something proved to be otherwise than they tell."""
        self._nodes.doubt(node_ids)

    def snapshot(self, session: Session) -> Snapshot:
        """Nodes, and all that waits with what its order depends on."""
        # Nodes first: what is placed in between is then in neither, and not in both.
        nodes = self.look(session)
        with self._lock:
            requests = self._pending.look(session)
        return Snapshot(
            nodes,
            requests,
            quotas.of_projects(session, {request.project_id for request in requests}),
            usage.projects(session, self.policy.usage_half_life_s),
            now().timestamp(),
            self.policy,
            # As the loop has learnt it; questions between its looks are judged by the same.
            self._decided.snapshot.potential if self._decided else None,
            frozenset(self._decided.plan.promised) if self._decided else frozenset(),
        )

    @contextmanager
    def evaluating(self, session: Session) -> Iterator[Evaluation]:
        """What the scheduler makes of the cluster as this transaction sees it; for one question at a time.

        As long as nothing changes, and for 2 s at most, all questions share what was computed before.
        """
        with self.evaluating_lock:
            snapshot = self.snapshot(session)
            if self._evaluation is None or not self._evaluation.still_holds(snapshot):
                self._evaluation = Evaluation(snapshot, self._memory, self._forecast_memory)
            yield self._evaluation

    @contextmanager
    def placing_at_once(self) -> Iterator[CycleCache]:
        """The memory of placements that are made within a create, which do not wait for questions."""
        with self._placing_at_once:
            yield self._placing_memory

    def publish(self, snapshot: Snapshot, plan: SchedulingPlan) -> None:
        """Let others in this process know what was decided a moment ago."""
        self._decided = Decided(snapshot, plan)

    @property
    def decided(self) -> "Decided | None":
        """The last look of this process; null before the first."""
        return self._decided

    @property
    def positions(self) -> Mapping[str, int]:
        """Places in the queue, from 1, of all that the last look let wait."""
        return self._decided.positions if self._decided else {}


@dataclass(frozen=True)
class Decided:
    """What the scheduler saw and what it made of it."""

    snapshot: Snapshot
    plan: SchedulingPlan

    @cached_property
    def positions(self) -> Mapping[str, int]:
        return {instance_id: place for place, instance_id in enumerate(self.plan.order, 1)}
