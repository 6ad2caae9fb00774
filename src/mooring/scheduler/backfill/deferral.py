"""What becomes of those that do not fit now: room that is made anyway, room made for them, or a moment.

In this order, because each costs more than the one before: what is stopping anyway is waited for; then others
are evicted, where that is allowed; then a node and a moment are kept from declared ends.
"""

from dataclasses import replace
from math import inf

from mooring.scheduler.backfill.planner import BackfillPlanner, Starts
from mooring.scheduler.backfill.timeline import BackfillSlot, expected_end, in_the_way, start_on
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.gangs import gangs
from mooring.scheduler.gangs.start_time import gang_start
from mooring.scheduler.model import Eviction, Request, Snapshot
from mooring.scheduler.node_changes import without
from mooring.scheduler.packing.node_classes import Ask, ask_of
from mooring.scheduler.packing.search import Key, find
from mooring.scheduler.preemption import Preemption
from mooring.scheduler.queue import Shares
from mooring.scheduler.units import Unit

# So many that wait are promised a moment by conservative backfill; the others are too far off to tell. On
# eight nodes 40 take 0.3 s of a look, and 100 nearly 3 s: all that is kept on a node is compared with itself.
MAX_CONSERVATIVE = 40
# Evictions are planned for so many units of a look: one that could be helped is helped by the next.
_MAX_PREEMPTORS = 8
# A look asks in vain for so many different moments; who is behind those is far from his turn.
_MAX_FAILURES = 16


class Promises:
    def __init__(
        self, snapshot: Snapshot, starts: Starts, world: ClusterState, shares: Shares, kept: BackfillPlanner
    ) -> None:
        self.evictions: list[Eviction] = []
        self._snapshot = snapshot
        self._at = snapshot.at
        self._starts = starts
        self._world = world
        self._kept = kept
        self._preemption = Preemption(world, snapshot.at, snapshot.policy, shares, kept)
        self._preemptors = 0
        self._without_help: set[Key] = set()
        self._without_moment: set[Key] = set()
        self._failures = 0
        self._reserved = 0
        self.promised: list[str] = []  # as `Plan.promised`
        self._covered: set[int] = set()  # kinds of nodes for which somebody ahead waits already
        self._kinds_of: dict[Ask, frozenset[int]] = {}  # what `_kinds_for` has told

    def promise(self, unit: Unit) -> bool:
        """Whether something is kept for the unit from now on.

        Nothing is kept for what waits for its project's quota, and nothing for what could never fit.
        """
        if gangs.over_quota(unit):
            return False
        first = self._is_head(unit)
        helped = self._helped(unit)
        parts = helped or self._reservation(unit)
        if not parts:
            return False
        self._kept.keep(unit, parts)
        if helped or first:
            self.promised.extend(member.instance_id for member in unit.members)
        return True

    # ---- room that is made

    def _helped(self, unit: Unit) -> list[BackfillSlot] | None:
        asked = (*gangs.key(self._world, unit), unit.priority)
        if asked in self._without_help:
            return None
        parts = self._by_stopping(unit) or self._by_eviction(unit)
        if not parts:
            self._without_help.add(asked)
        return parts

    def _by_stopping(self, unit: Unit) -> list[BackfillSlot] | None:
        """Where the unit will fit once what is on its way out has gone."""
        stopping = [index for index in sorted(self._world.with_stopping) if self._last_stop(index) < inf]
        if not stopping:
            return None
        return (
            self._one_by_stopping(unit.first, stopping) if unit.gang is None else self._gang(unit, stopping)
        )

    def _last_stop(self, index: int) -> float:
        node = self._world.node(index)
        return max(expected_end(each, self._at) for each in node.running if each.stopping)

    def _one_by_stopping(self, request: Request, stopping: list[int]) -> list[BackfillSlot] | None:
        found: list[tuple[float, str, int]] = []
        for index in stopping:
            node = self._world.node(index)
            start = start_on(node, request, self._at, self._kept.kept(index))
            if start is not None and start <= self._last_stop(index):
                found.append((start, node.id, index))
        if not found:
            return None
        start, _id, index = min(found)
        return [BackfillSlot(request, index, start, in_the_way(self._world.node(index), start, self._at))]

    def _gang(self, unit: Unit, stopping: list[int]) -> list[BackfillSlot] | None:
        until = max(self._last_stop(index) for index in stopping)
        with self._world.supposing():
            for index in stopping:
                node = self._world.node(index)
                self._world.put(without(node, [each for each in node.running if each.stopping]))
            found = gangs.place(self._world, unit, replace(self._at, now=until), self._kept.allowing)
        members = {member.instance_id: member for member in unit.members}
        return [
            BackfillSlot(
                members[each.placement.instance_id],
                each.index,
                until,
                in_the_way(self._world.node(each.index), until, self._at),
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
        return list(planned.parts)

    def _fits_but_for_others(self, unit: Unit) -> bool:
        """Whether only what is kept for those ahead keeps it out: it waits its turn, and evicts nobody."""
        return unit.gang is None and find(self._world, unit.first, self._at) is not None

    # ---- a moment

    def _reservation(self, unit: Unit) -> list[BackfillSlot] | None:
        asked = gangs.key(self._world, unit)
        if asked in self._without_moment or self._failures >= _MAX_FAILURES:
            return None
        conservative = self._snapshot.policy.backfill == "conservative"
        if self._reserved >= MAX_CONSERVATIVE or not (conservative or self._is_head(unit)):
            return None
        parts = self._first(unit)
        if parts:
            self._reserved += 1
            self._covered |= self._kinds(unit)
        else:
            self._failures += 1
            self._without_moment.add(asked)
        return parts

    def _is_head(self, unit: Unit) -> bool:
        """Whether nobody ahead that waits could have any of the nodes that it could have."""
        return self._covered.isdisjoint(self._kinds(unit))

    def _kinds(self, unit: Unit) -> frozenset[int]:
        return frozenset[int]().union(*map(self._kinds_for, unit.members))

    def _kinds_for(self, member: Request) -> frozenset[int]:
        """The kinds of nodes that have what it asks for, in use or not."""
        world = self._world
        asked = ask_of(member) if member.gpu_count else ()
        if asked not in self._kinds_of:
            self._kinds_of[asked] = frozenset(
                number
                for number in range(len(world.kinds))
                if not member.gpu_count or world.suitable(number, member).models
            )
        return self._kinds_of[asked]

    def _first(self, unit: Unit) -> list[BackfillSlot] | None:
        if unit.gang is not None:
            return gang_start(self._world, self._starts, unit, self._at, self._kept)
        first = self._starts.first(unit.first, self._at, self._kept)
        if first is None and self._overdue(unit):
            first = self._starts.draining(unit.first, self._at, self._kept)
        return [first] if first else None

    def _overdue(self, unit: Unit) -> bool:
        """It has waited for so long that a node is left to run empty for it."""
        return self._at.now - unit.queued_at > self._snapshot.policy.overdue_after_s
