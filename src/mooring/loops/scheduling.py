"""Pending instances become scheduled ones: read the world, decide, write down what still holds."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from mooring.control.instances import placements as placing
from mooring.control.instances import preemption, waiting_reasons
from mooring.control.scheduling import pending, usage
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.instance.state import Reason
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops.loop import Loop
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Eviction, NodeView, Placement, Request, SchedulingPlan, Snapshot, Unplaced
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.schedule import schedule

# Placements written in one transaction: enough to share its fsync, few enough to let others write.
BATCH = 32
_MOST_TOLD = 100
# Whoever waits is told why this often even if it is what this process told before.
_TELL_ALL_S = 30.0
# Of so many of the newest instances, those that wait or not, a new process learns what is asked for.
_LEARNT_FROM = 4000

_MANY_NODES = 1000

# A request's time in the queue tells it from the same instance when it waits another time.
_Told = tuple[float, Reason]


class Scheduling(Loop):
    """`queue` fires when something new waits, `schedule` when something may have become free.

    Whatever wakes it, all that waits is looked at in order: what is new may start only where it delays nobody
    that comes before it. Time alone changes things as well: ends come near, reservations begin.
    """

    topics = (Topic.QUEUE, Topic.SCHEDULE)
    interval_s = 5.0

    def __init__(self, database: Database, world: SchedulerCache) -> None:
        super().__init__(database)
        self._world = world
        self._memory = CycleCache()
        self._learning: Learning | None = None
        self._told: dict[str, _Told] = {}
        self._told_all_at = float("-inf")
        self._counted_at = float("-inf")

    def tick(self) -> None:
        with self.database.read() as session:
            snapshot = self._world.snapshot(session)
            if self._learning is None:
                self._learning = self._taught(session, snapshot)
                leave_to_stay(snapshot.nodes)
        snapshot = self._learning.learn(snapshot, self._memory)
        self._count_usage(snapshot)
        plan = schedule(snapshot, self._memory) if snapshot.requests else SchedulingPlan((), ())
        self._world.publish(snapshot, plan)
        self._place(plan.placements, snapshot.requests)
        if plan.evictions:
            self._evict(plan.evictions, snapshot)
        self._explain(plan.unplaced, snapshot.requests)

    def _taught(self, session: Session, snapshot: Snapshot) -> Learning:
        """A restart forgets nothing of what was asked for lately."""
        learning = Learning()
        requests = pending.recent_requests(session, _LEARNT_FROM)
        learning.learn(replace(snapshot, requests=requests), self._memory)
        return learning

    def _count_usage(self, snapshot: Snapshot) -> None:
        passed_s = time.monotonic() - self._counted_at
        if passed_s < usage.INTERVAL_S:
            return
        self._counted_at = time.monotonic()
        if any(node.running for node in snapshot.nodes):
            with self.database.write() as session:
                usage.add_sample(session, snapshot.nodes, snapshot.policy.usage_half_life_s, passed_s)

    def _place(self, placements: Sequence[Placement], requests: Sequence[Request]) -> None:
        refused: list[Placement] = []
        for batch in _batches(placements, requests):
            with self.database.write() as session:
                placed = set(placing.assign(session, batch))
            refused += [each for each in batch if each.instance_id not in placed]
        if refused:
            # The world was another by then. What was refused is decided anew, from nodes that are read anew;
            # at once, unless nothing at all held.
            self._world.invalidate({each.node_id for each in refused})
            if len(refused) < len(placements):
                self.wake()

    def _evict(self, evictions: Sequence[Eviction], snapshot: Snapshot) -> None:
        going = {each.instance_id for node in snapshot.nodes for each in node.running if each.stopping}
        with self.database.write() as session:
            preemption.evict(session, evictions, snapshot.policy.preemption_min_run_s, going)

    def _explain(self, unplaced: Sequence[Unplaced], requests: Sequence[Request]) -> None:
        since = {request.instance_id: request.queued_at for request in requests}
        reasons = {
            each.instance_id: (since[each.instance_id], waiting_reasons.waiting_reason(each))
            for each in unplaced
        }
        if time.monotonic() - self._told_all_at > _TELL_ALL_S:
            self._told_all_at = time.monotonic()
            self._told = {}
        news = [each for each in unplaced if self._told.get(each.instance_id) != reasons[each.instance_id]]
        for start in range(0, len(news), _MOST_TOLD):
            with self.database.write() as session:
                waiting_reasons.explain_unplaced(session, news[start : start + _MOST_TOLD])
        self._told = reasons


def leave_to_stay(nodes: Sequence[NodeView]) -> None:
    """Keep Python's garbage collector from what will be there for as long as the process is.

    Of 10,000 nodes with 80,000 GPUs each full collection takes 0.3 s, in which nobody is answered. None of it
    is in a cycle: what changes goes when nobody has it any more.
    """
    if len(nodes) >= _MANY_NODES:
        gc.collect()
        gc.freeze()


def _batches(placements: Sequence[Placement], requests: Sequence[Request]) -> Iterator[Sequence[Placement]]:
    """All members of a gang are in one."""
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
