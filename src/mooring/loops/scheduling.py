"""The scheduling loop: reads a snapshot, runs a scheduling cycle, and writes its placements and evictions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from mooring.control import event_order
from mooring.control.instances import preemption
from mooring.control.instances.placements import assign
from mooring.control.scheduling import pending, usage
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.cpu_share import CpuShare
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops.garbage import exclude_present_objects
from mooring.loops.loop import Loop
from mooring.loops.waiting_reasons import WaitingReasons
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Eviction, Placement, Request, Snapshot
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import schedule

# Placements written in one transaction: enough to share its fsync, few enough to let others write.
BATCH = 32
# Replicas that do not lead run cycles too: the leader may stand still, and each shows its last cycle.
BETWEEN_CYCLES_OF_OTHERS_S = 1.0
# A cycle for each create would keep a core busy. After a pause a create starts a cycle at once; behind
# others it waits for one rest at most.
_SHARE_OF_A_CORE = 0.08
_BURST_S = 0.03
_LONGEST_REST_S = 0.2
# A new process learns the usual requests from this many of the newest instances.
_LEARNT_FROM = 4000

# Cached nodes are excluded from garbage collections once there are this many, and again after this growth.
_MANY_NODES = 1000
_GROWTH = 1.25


class Scheduling(Loop):
    """`queue` is notified when an instance becomes pending, `schedule` when resources may have become free.

    Each tick considers all pending instances in order: one may start only if it delays none before it.
    Ticks without a notification are needed too: planned ends come near and reservations begin.
    """

    topics = (Topic.QUEUE, Topic.SCHEDULE)
    interval_s = 5.0

    def __init__(self, database: Database, cache: SchedulerCache) -> None:
        super().__init__(database)
        self._cache = cache
        self._cycle_cache = CycleCache()
        self._cpu_share = CpuShare(_SHARE_OF_A_CORE, _BURST_S, _LONGEST_REST_S)
        self._learning: Learning | None = None
        self._reasons = WaitingReasons(database)
        self._counted_at = float("-inf")
        self._frozen_nodes = 0

    def tick(self) -> None:
        with self.database.read() as session:
            complete_to = event_order.complete_to(session)
        with self.database.read() as session:
            snapshot = self._cache.snapshot(session, complete_to=complete_to)
            if self._learning is None:
                self._learning = self._learn(session, snapshot)
        if len(snapshot.nodes) >= max(_MANY_NODES, self._frozen_nodes * _GROWTH):
            self._frozen_nodes = len(snapshot.nodes)
            exclude_present_objects()
        snapshot = self._learning.learn(snapshot, self._cycle_cache)
        self._count_usage(snapshot)
        plan = schedule(snapshot, self._cycle_cache) if snapshot.requests else SchedulingPlan((), ())
        self._cache.publish(snapshot, plan)
        self._place(plan.placements, snapshot.requests)
        if plan.evictions:
            self._evict(plan.evictions, snapshot)
        self._reasons.write(plan.waiting)
        self._cache.prepare_evaluation(snapshot)

    def rest_after(self, cpu_s: float) -> float:
        """Many creates share one cycle. Of several replicas, one reacts to each create."""
        rest_s = max(super().rest_after(cpu_s), self._cpu_share.rest_after(cpu_s, time.monotonic()))
        return rest_s if self.database.leads else max(rest_s, BETWEEN_CYCLES_OF_OTHERS_S)

    def _learn(self, session: Session, snapshot: Snapshot) -> Learning:
        """Learn from recent requests, so that a restart does not lose what was learned."""
        learning = Learning()
        requests = pending.recent_requests(session, _LEARNT_FROM)
        learning.learn(replace(snapshot, requests=requests), self._cycle_cache)
        return learning

    def _count_usage(self, snapshot: Snapshot) -> None:
        passed_s = time.monotonic() - self._counted_at
        if passed_s < usage.INTERVAL_S:
            return
        self._counted_at = time.monotonic()
        if any(node.running for node in snapshot.nodes):
            with self.database.write() as session:
                usage.add_sample(session, snapshot.nodes, snapshot.policy, passed_s)

    def _place(self, placements: Sequence[Placement], requests: Sequence[Request]) -> None:
        rejected: list[Placement] = []
        for batch in _batches(placements, requests):
            with self.database.write() as session:
                placed = set(assign(session, batch))
            rejected += [each for each in batch if each.instance_id not in placed]
        if rejected:
            # The snapshot was outdated: read these nodes again. If anything was placed, plan again at once.
            self._cache.invalidate({each.node_id for each in rejected})
            if len(rejected) < len(placements):
                self.wake()

    def _evict(self, evictions: Sequence[Eviction], snapshot: Snapshot) -> None:
        stopping = {each.instance_id for node in snapshot.nodes for each in node.running if each.stopping}
        with self.database.write() as session:
            preemption.evict(session, evictions, snapshot.policy.preemption_min_run_s, stopping)


def _batches(placements: Sequence[Placement], requests: Sequence[Request]) -> Iterator[Sequence[Placement]]:
    """Split placements into batches; all members of a gang are in one batch."""
    gangs = {request.instance_id: request.gang.group_id for request in requests if request.gang}
    batch: list[Placement] = []
    for each in placements:
        if len(batch) >= BATCH and not _same_gang(gangs, batch[-1], each):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _same_gang(gangs: Mapping[str, str], one: Placement, other: Placement) -> bool:
    gang = gangs.get(one.instance_id)
    return gang is not None and gang == gangs.get(other.instance_id)
