"""The scheduler's input, cached in memory and shared by all threads of the process."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.orm import Session

from mooring.control.scheduling import quotas, usage
from mooring.control.scheduling.evaluation import Evaluation
from mooring.control.scheduling.node_views import NodeViews
from mooring.control.scheduling.pending import Pending
from mooring.core.policy import Policy
from mooring.db.types import now
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.differences import differences
from mooring.scheduler.model import NodeView, Request, Snapshot
from mooring.scheduler.plan import SchedulingPlan

# Requests, which take about 10 ms to order.
_MANY_NEW = 500


class SchedulerCache:
    """There is one in each process. Each read refreshes what has changed."""

    def __init__(self, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy or Policy()
        self._nodes = NodeViews(clock)
        self._pending = Pending(clock)
        self._projects = _PendingProjects()
        self._lock = threading.Lock()
        self._last_cycle: CompletedCycle | None = None
        self.evaluating_lock = threading.Lock()
        self._cycle_cache = CycleCache()
        self._forecast_cache = CycleCache()
        self._evaluation: Evaluation | None = None
        self._immediate_lock = threading.Lock()
        self._immediate_cache = CycleCache()

    def nodes(self, session: Session) -> tuple[NodeView, ...]:
        """Every node as this transaction sees it, by id; an unchanged node is the same object."""
        return self._nodes.current(session)

    def invalidate(self, node_ids: Iterable[str]) -> None:
        """Read these nodes again next time, because the cached values turned out to be wrong."""
        self._nodes.invalidate(node_ids)

    def snapshot(
        self, session: Session, *, added: Collection[str] = (), complete_to: float | None = None
    ) -> Snapshot:
        """The nodes, the pending requests, and what their order depends on.

        Args:
            added: pending instances that this transaction has added.
            complete_to: for the scheduling loop, as in `Pending.refresh`.
        """
        # Nodes first: an instance placed between the two reads is then in neither, rather than in both.
        nodes = self.nodes(session)
        with self._lock:
            if complete_to is None:
                requests = self._pending.current(session)
            else:
                requests = self._pending.refresh(session, complete_to)
            projects = self._projects.of(requests)
        if added:
            new = self._pending.added(session, added)
            requests, projects = requests + new, projects | {each.project_id for each in new}
        return Snapshot(
            nodes=nodes,
            requests=requests,
            quotas=quotas.of_projects(session, projects),
            projects=usage.projects(session, self.policy),
            now=now().timestamp(),
            policy=self.policy,
            # From the scheduling loop, so that evaluations between its cycles use the same values.
            potential=self._last_cycle.snapshot.potential if self._last_cycle else None,
            with_slots=frozenset(self._last_cycle.plan.with_slots) if self._last_cycle else frozenset(),
        )

    @contextmanager
    def evaluating(self, session: Session) -> Iterator[Evaluation]:
        """The scheduler's evaluation of the cluster as this transaction sees it; for one thread at a time.

        All callers share the results until something changes, for `MAX_AGE_S` at most.
        """
        with self.evaluating_lock:
            snapshot = self.snapshot(session)
            if self._evaluation is None or not self._evaluation.is_valid_for(snapshot):
                self._evaluation = Evaluation(snapshot, self._cycle_cache, self._forecast_cache)
            yield self._evaluation

    def prepare_evaluation(self, snapshot: Snapshot) -> None:
        """Order many new requests before a client asks for the queue: 20,000 take half a second.

        Does nothing while an evaluation is in use: the scheduling loop must not wait for clients.
        """
        ordered = len(self._evaluation.snapshot.requests) if self._evaluation else 0
        if len(snapshot.requests) - ordered < _MANY_NEW or not self.evaluating_lock.acquire(blocking=False):
            return
        try:
            self._evaluation = Evaluation(snapshot, self._cycle_cache, self._forecast_cache)
            self._evaluation.order_queue()
        finally:
            self.evaluating_lock.release()

    @contextmanager
    def immediate_placement(self) -> Iterator[CycleCache]:
        """The cycle cache of placements within a create. Such placements do not wait for evaluations."""
        with self._immediate_lock:
            yield self._immediate_cache

    def publish(self, snapshot: Snapshot, plan: SchedulingPlan) -> None:
        """Set the result of the last scheduling cycle."""
        self._last_cycle = CompletedCycle(snapshot, plan)

    @property
    def last_cycle(self) -> "CompletedCycle | None":
        """The last scheduling cycle of this process; None before the first."""
        return self._last_cycle

    @property
    def positions(self) -> Mapping[str, int]:
        """Queue positions, from 1, of all instances that the last scheduling cycle left pending."""
        return self._last_cycle.plan.positions if self._last_cycle else {}


class _PendingProjects:
    """The projects of the pending requests, counted by what has changed since the last call."""

    def __init__(self) -> None:
        self._requests: tuple[Request, ...] = ()
        self._counts: Counter[str] = Counter()

    def of(self, requests: tuple[Request, ...]) -> frozenset[str]:
        if requests is not self._requests:
            gone, new = differences(self._requests, requests)
            self._requests = requests
            self._counts.update(each.project_id for each in new)
            self._counts.subtract(each.project_id for each in gone)
            self._counts = +self._counts
        return frozenset(self._counts)


@dataclass(frozen=True)
class CompletedCycle:
    """The input and the result of one scheduling cycle."""

    snapshot: Snapshot
    plan: SchedulingPlan
