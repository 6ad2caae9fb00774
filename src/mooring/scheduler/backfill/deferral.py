"""Plans for units that do not fit now: wait for stopping instances, preempt others, or get a backfill slot.

They are tried in this order. A backfill slot relies on the declared ends of running instances.
"""

from dataclasses import replace
from math import inf

from mooring.scheduler.backfill.planner import BackfillPlanner, StartTimes
from mooring.scheduler.backfill.timeline import BackfillSlot, ended_by, expected_end, start_on
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.feasibility.gpu_rules import GpuKey, gpu_key
from mooring.scheduler.gangs import gangs
from mooring.scheduler.gangs.start_time import gang_start
from mooring.scheduler.model import Eviction, Request, Snapshot
from mooring.scheduler.node_changes import without
from mooring.scheduler.packing.search import Key, find
from mooring.scheduler.preemption import Preemption
from mooring.scheduler.queue import ProjectShares
from mooring.scheduler.units import Unit

# The most units that get a slot by declared ends; those further back get none. On eight nodes, 40 slots take
# 0.3 s of a cycle, and 100 nearly 3 s, because the slots of a node are compared with each other.
MAX_CONSERVATIVE = 40
# The most units for which a cycle plans evictions. Others wait for the next cycle.
_MAX_PREEMPTORS = 8
# The most failed searches for a slot per cycle. Units further back wait for the next cycle.
_MAX_FAILURES = 16


class DeferralPlanner:
    def __init__(
        self,
        snapshot: Snapshot,
        start_times: StartTimes,
        cluster: ClusterState,
        shares: ProjectShares,
        backfill: BackfillPlanner,
    ) -> None:
        self.evictions: list[Eviction] = []
        self._snapshot = snapshot
        self._at = snapshot.at
        self._start_times = start_times
        self._cluster = cluster
        self._backfill = backfill
        self._preemption = Preemption(cluster, snapshot, shares, backfill)
        self._preemptors = 0
        self._failed_to_free: set[Key] = set()  # keys of units, for `_slots_by_freeing`
        self._without_start: set[Key] = set()  # keys of units, for `_slots_by_declared_ends`
        self._failures = 0
        self._planned = 0
        self.with_slots: list[str] = []  # as `SchedulingPlan.with_slots`
        self._covered: set[int] = set()  # node kinds that a unit with a slot by declared ends could use
        self._kinds_of: dict[GpuKey, frozenset[int]] = {}  # results of `_kinds_for`

    def defer(self, unit: Unit) -> bool:
        """Add backfill slots for the unit, and return whether there are any.

        A unit gets none if it waits for its project's quota, could never fit, or is too far back.
        """
        if gangs.over_quota(unit):
            return False
        is_head = self._is_head(unit)
        freed = self._slots_by_freeing(unit)
        slots = freed or self._slots_by_declared_ends(unit)
        if not slots:
            return False
        self._backfill.add(unit, slots)
        if freed or is_head:
            self.with_slots.extend(member.instance_id for member in unit.members)
        return True

    # ---- resources of stopping or evicted instances

    def _slots_by_freeing(self, unit: Unit) -> list[BackfillSlot] | None:
        key = (*gangs.key(self._cluster, unit), unit.priority)
        if key in self._failed_to_free:
            return None
        slots = self._by_stopping(unit) or self._by_eviction(unit)
        if not slots:
            self._failed_to_free.add(key)
        return slots

    def _by_stopping(self, unit: Unit) -> list[BackfillSlot] | None:
        """Slots where the unit fits once the stopping instances are gone."""
        stopping = [index for index in sorted(self._cluster.with_stopping) if self._last_stop(index) < inf]
        if not stopping:
            return None
        if unit.gang is None:
            return self._request_by_stopping(unit.first, stopping)
        return self._gang_by_stopping(unit, stopping)

    def _last_stop(self, index: int) -> float:
        node = self._cluster.node(index)
        return max(expected_end(each, self._at) for each in node.running if each.stopping)

    def _request_by_stopping(self, request: Request, stopping: list[int]) -> list[BackfillSlot] | None:
        found: list[tuple[float, str, int]] = []
        for index in stopping:
            node = self._cluster.node(index)
            start = start_on(node, request, self._at, self._backfill.slots(index))
            if start is not None and start <= self._last_stop(index):
                found.append((start, node.id, index))
        if not found:
            return None
        start, _id, index = min(found)
        return [BackfillSlot(request, index, start, ended_by(self._cluster.node(index), start, self._at))]

    def _gang_by_stopping(self, unit: Unit, stopping: list[int]) -> list[BackfillSlot] | None:
        until = max(self._last_stop(index) for index in stopping)
        with self._cluster.what_if():
            for index in stopping:
                node = self._cluster.node(index)
                self._cluster.put(without(node, [each for each in node.running if each.stopping]))
            found = gangs.place(self._cluster, unit, replace(self._at, now=until), self._backfill.allowing)
        members = {member.instance_id: member for member in unit.members}
        return [
            BackfillSlot(
                members[each.placement.instance_id],
                each.index,
                until,
                ended_by(self._cluster.node(each.index), until, self._at),
            )
            for each in found or ()
        ]

    def _by_eviction(self, unit: Unit) -> list[BackfillSlot] | None:
        if self._preemptors >= _MAX_PREEMPTORS or not self._preemption.may_help(unit):
            return None
        if self._fits_but_for_others(unit):
            return None
        planned = self._preemption.plan(unit)
        if planned is None:
            return None
        self._preemptors += 1
        self.evictions.extend(planned.evictions)
        return list(planned.slots)

    def _fits_but_for_others(self, unit: Unit) -> bool:
        """Whether only slots of units ahead keep a request out: then it evicts nothing. False for gangs."""
        return unit.gang is None and find(self._cluster, unit.first, self._at) is not None

    # ---- declared ends

    def _slots_by_declared_ends(self, unit: Unit) -> list[BackfillSlot] | None:
        key = gangs.key(self._cluster, unit)
        if key in self._without_start or self._failures >= _MAX_FAILURES:
            return None
        conservative = self._snapshot.policy.backfill == "conservative"
        if self._planned >= MAX_CONSERVATIVE or not (conservative or self._is_head(unit)):
            return None
        slots = self._earliest_slots(unit)
        if slots:
            self._planned += 1
            self._covered |= self._kinds(unit)
        else:
            self._failures += 1
            self._without_start.add(key)
        return slots

    def _is_head(self, unit: Unit) -> bool:
        """Whether no unit ahead with a slot by declared ends could use a node that this unit could use."""
        return self._covered.isdisjoint(self._kinds(unit))

    def _kinds(self, unit: Unit) -> frozenset[int]:
        return frozenset[int]().union(*map(self._kinds_for, unit.members))

    def _kinds_for(self, member: Request) -> frozenset[int]:
        """The node kinds with suitable GPUs, in use or not; all for a request without GPUs."""
        if not member.gpu_count:
            return frozenset(range(len(self._cluster.kinds)))
        key = gpu_key(member)
        if key not in self._kinds_of:
            self._kinds_of[key] = frozenset(
                number for number, of_kind in enumerate(self._cluster.suitable(member)) if of_kind.models
            )
        return self._kinds_of[key]

    def _earliest_slots(self, unit: Unit) -> list[BackfillSlot] | None:
        if unit.gang is not None:
            return gang_start(self._cluster, self._start_times, unit, self._at, self._backfill)
        first = self._start_times.first(unit.first, self._at, self._backfill)
        if first is None and self._overdue(unit):
            first = self._start_times.draining(unit.first, self._at, self._backfill)
        return [first] if first else None

    def _overdue(self, unit: Unit) -> bool:
        """Whether the unit has waited so long that a node is drained for it."""
        return self._at.now - unit.queued_at > self._snapshot.policy.overdue_after_s
