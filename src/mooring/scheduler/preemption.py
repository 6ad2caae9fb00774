"""Choose victims: the fewest, then those that lose the least work; for one request all on one node.

Evictions are planned only for requests that fit on no node, now or once the stopping instances are gone. No
instance is evicted without need. If one member of a gang is evicted, all its members stop, and all count.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, fsum
from typing import Literal, NamedTuple

import numpy as np

from mooring.scheduler.backfill.planner import BackfillPlanner
from mooring.scheduler.backfill.timeline import BackfillSlot
from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import filters
from mooring.scheduler.feasibility.filters import closed, fits, fitting_offers
from mooring.scheduler.feasibility.gpu_rules import passing
from mooring.scheduler.gangs import gangs
from mooring.scheduler.model import Eviction, NodeView, PlanTime, Request, Running, Snapshot
from mooring.scheduler.node_changes import with_placement, without
from mooring.scheduler.packing.search import find, placement, shape, with_request
from mooring.scheduler.queue import ProjectShares
from mooring.scheduler.units import Unit

Because = Literal["priority", "reclaim"]
# The most sets of victims of one size to compare on a node; above it, a heuristic chooses.
_MAX_SETS = 500
# The most nodes to compare for a request: those that need no more victims than the lower bound, and all.
_MAX_MINIMAL = 64
_MAX_FOUND = 256
# The most nodes on which a cycle chooses victims. Later units wait for the next cycle.
_MAX_EXAMINED = 4000


class Price(NamedTuple):
    """The cost of evictions; the lowest is best."""

    stopped: int  # instances
    gangs: int  # that lose a member
    lost_work: float  # GPU-seconds; a CPU-second counts a thousandth of one


@dataclass(frozen=True, slots=True)
class _Victims:
    """Victims on one node."""

    chosen: tuple[Running, ...]
    price: Price


@dataclass(frozen=True, slots=True)
class Evictions:
    """The evictions for a unit, and the backfill slots of its members."""

    evictions: tuple[Eviction, ...]
    slots: tuple[BackfillSlot, ...]


class Preemption:
    """Plans the evictions of one cycle, each in view of the earlier ones."""

    def __init__(
        self, cluster: ClusterState, snapshot: Snapshot, shares: ProjectShares, backfill: BackfillPlanner
    ) -> None:
        self.cluster = cluster
        self.at = snapshot.at
        # When the victims are gone: by then, a reservation may have begun, or be about to begin.
        self.then = replace(self.at, now=self.at.now + self.at.overhead_s)
        self._policy = snapshot.policy
        self._shares = shares
        self.backfill = backfill
        self._reclaims = False  # whether the current unit reclaims its project's guarantee
        self._examined = 0
        self._releasing: dict[str, int] = dict(cluster.stopping)  # GPUs (milli) by project, also of victims
        self._evicted: set[str] = set()  # instances that this cycle stops already; they cost nothing
        self._gangs: dict[str, tuple[Running, ...]] = {}  # results of `_gang` for the current unit

    def plan(self, unit: Unit) -> Evictions | None:
        """The evictions that make room for the unit, or None. The cluster state is left unchanged."""
        self._reclaims = self._shares.within_guarantee(unit)
        self._gangs.clear()
        best: _Trial | None = None
        for among in [None] if unit.gang is None else gangs.sets(self.cluster, unit):
            trial = _Trial(self, unit, among)
            if trial.succeeded and (best is None or trial.price < best.price):
                best = trial
        return self._commit(unit, best) if best else None

    def may_help(self, unit: Unit) -> bool:
        """Whether any instance might be evicted for the unit: a cheap check before the search."""
        if any(priority < unit.priority for priority in self.cluster.preemptible):
            return True
        return self._shares.within_guarantee(unit) and (
            bool(self.cluster.preemptible) or any(map(self._borrowing, self.cluster.held))
        )

    def _commit(self, unit: Unit, trial: "_Trial") -> Evictions:
        evictions: list[Eviction] = []
        for member, index in trial.placed:
            for victim in trial.victims.get(index, ()):
                if all(each.instance_id != victim.instance_id for each in evictions):
                    node_id = self.cluster.node(index).id
                    because = self.because(unit, victim)
                    evictions.append(Eviction(victim.instance_id, node_id, member.instance_id, because))
        for each in self._stopped_by(victim for victims in trial.victims.values() for victim in victims):
            self._evicted.add(each.instance_id)
            self._releasing[each.project_id] = self._releasing.get(each.project_id, 0) + each.gpu_milli
        return Evictions(tuple(evictions), tuple(trial.slots()))

    def candidates(self, unit: Unit, node: NodeView) -> list[Running]:
        return [running for running in node.running if self._evictable(unit, running)]

    def _evictable(self, unit: Unit, running: Running) -> bool:
        if running.stopping or self.at.now - running.since < self._policy.preemption_min_run_s:
            return False
        if unit.gang is not None and running.group_id == unit.gang.group_id:
            return False
        if running.preemptible and running.priority < unit.priority:
            return True
        return self._reclaimable(unit, running)

    def _reclaimable(self, unit: Unit, running: Running) -> bool:
        if running.project_id == unit.project_id or not running.gpu_milli:
            return False
        return self._reclaims and (running.preemptible or self._borrowing(running.project_id))

    def _borrowing(self, project_id: str, less_milli: int = 0) -> bool:
        return self._shares.beyond_guarantee(project_id, -less_milli - self._releasing.get(project_id, 0))

    def because(self, unit: Unit, running: Running) -> Because:
        by_priority = running.preemptible and running.priority < unit.priority
        return "priority" if by_priority else "reclaim"

    def may_evict(self, victims: Iterable[Running]) -> bool:
        """Whether each project exceeds its guarantee until its last non-preemptible victim is evicted.

        The largest is evicted last. A gang counts as one instance with the GPUs of all its members.
        """
        taken: dict[str, Counter[str]] = {}
        for each in self._stopped_by(victim for victim in victims if not victim.preemptible):
            evicted_id = each.group_id or each.instance_id
            taken.setdefault(each.project_id, Counter())[evicted_id] += each.gpu_milli
        return all(
            self._borrowing(project, milli.total() - max(milli.values())) for project, milli in taken.items()
        )

    def price(self, victims: Iterable[Running]) -> Price:
        stopped = self._stopped_by(victims)
        lost = (
            (self.at.now - each.since) * (each.gpu_milli + each.cpu_milli / 1000) / 1000 for each in stopped
        )
        gangs_hit = {each.group_id for each in stopped if each.group_id is not None}
        return Price(len(stopped), len(gangs_hit), fsum(lost))

    def _stopped_by(self, victims: Iterable[Running]) -> list[Running]:
        """The victims and the members of their gangs, without those that are stopping or evicted already."""
        stopped: dict[str, Running] = {}
        for victim in victims:
            for each in (victim,) if victim.group_id is None else self._gang(victim.group_id):
                if each.instance_id not in self._evicted and not each.stopping:
                    stopped[each.instance_id] = each
        return list(stopped.values())

    def _gang(self, group_id: str) -> tuple[Running, ...]:
        """The running members, cached before the what-if of a trial removes any of them."""
        if group_id not in self._gangs:
            nodes = (self.cluster.node(index) for index in sorted(self.cluster.groups[group_id]))
            running = (each for node in nodes for each in node.running if each.group_id == group_id)
            self._gangs[group_id] = tuple(running)
        return self._gangs[group_id]

    def best_victims(self, unit: Unit, request: Request, among: Mask | None) -> tuple[int, _Victims] | None:
        """The node with the fewest, then the cheapest victims; ties by node id.

        Of very many nodes with equally few victims, only the first are compared.
        """
        best: tuple[Price, str] | None = None  # the lowest price, and the id of its node
        chosen: tuple[int, _Victims] | None = None
        for count, nodes in self._by_fewest(unit, request, among):
            if chosen is not None and chosen[1].price.stopped < count:
                break
            found = minimal = 0
            for index in nodes:
                if minimal >= _MAX_MINIMAL or found >= _MAX_FOUND or self._examined >= _MAX_EXAMINED:
                    break
                self._examined += 1
                victims = self._victims_on(unit, request, index)
                if victims is None:
                    continue
                found += 1
                minimal += victims.price.stopped <= count
                rank = victims.price, self.cluster.node(index).id
                if best is None or rank < best:
                    best, chosen = rank, (index, victims)
        return chosen

    def _by_fewest(self, unit: Unit, request: Request, among: Mask | None) -> Iterator[tuple[int, list[int]]]:
        """The nodes in order of id, grouped by a lower bound for the number of victims that each needs."""
        key = (*shape(request), request.project_id, unit.priority, self._reclaims)
        counts = self.cluster.numbers(("fewest", key), lambda node: self._min_victims_on(unit, request, node))
        for count in np.unique(counts[counts > 0]).tolist():
            indexes = np.flatnonzero(counts == count if among is None else among & (counts == count)).tolist()
            without_slots = [each for each in indexes if not self.backfill.slots(each)]
            yield count, sorted(without_slots, key=lambda index: self.cluster.node(index).id)

    def _min_victims_on(self, unit: Unit, request: Request, node: NodeView) -> int:
        """`_min_victims` of all possible victims on the node; 0 if evicting them does not help."""
        if closed(node, request):
            return 0
        victims = [each for each in node.running if self._possible_victim(unit, each)]
        return (_min_victims(node, request, victims) or 0) if victims else 0

    def _possible_victim(self, unit: Unit, running: Running) -> bool:
        """Whether it could be evicted, now or at another time or with other allocations of its project."""
        if running.stopping:
            return False
        return (running.preemptible and running.priority < unit.priority) or (
            self._reclaims and running.project_id != unit.project_id
        )

    def _victims_on(self, unit: Unit, request: Request, index: int) -> _Victims | None:
        node = self.cluster.node(index)
        victims = self.candidates(unit, node)
        if not fits(without(node, victims), request, self.then):
            return None
        by_price = sorted(victims, key=lambda victim: (self.price([victim]), victim.instance_id))
        best: _Victims | None = None
        for size in range(1, len(victims) + 1):
            # A larger set may stop fewer instances in total, if its victims are of one gang.
            if best and best.price.stopped <= size:
                break
            if comb(len(victims), size) > _MAX_SETS:
                return best or self._reduced(node, request, by_price)
            sets = [chosen for chosen in combinations(by_price, size) if self._suffice(node, request, chosen)]
            found = min(map(self._victims, sets), key=lambda choice: choice.price, default=None)
            best = found if best is None or (found and found.price < best.price) else best
        return best

    def _reduced(self, node: NodeView, request: Request, victims: list[Running]) -> _Victims | None:
        """Remove unneeded victims one by one, starting with those that free little and cost much."""
        chosen = victims
        for victim in sorted(victims, key=self._removal_order):
            fewer = [each for each in chosen if each is not victim]
            if self._suffice(node, request, fewer):
                chosen = fewer
        return self._victims(chosen) if self._suffice(node, request, chosen) else None

    def _removal_order(self, victim: Running) -> tuple[float, ...]:
        return (victim.gpu_milli, *(-part for part in self.price([victim])))

    def _victims(self, chosen: Sequence[Running]) -> _Victims:
        return _Victims(tuple(chosen), self.price(chosen))

    def _suffice(self, node: NodeView, request: Request, victims: Sequence[Running]) -> bool:
        return self.may_evict(victims) and fits(without(node, victims), request, self.then)


class _Trial:
    """Tries to place all members of a unit on a set of nodes. The cluster state is unchanged afterwards."""

    def __init__(self, preemption: Preemption, unit: Unit, among: Mask | None) -> None:
        self._preemption = preemption
        self._cluster = preemption.cluster
        self._at = preemption.then
        self._among = among
        self.victims: dict[int, tuple[Running, ...]] = {}  # by node
        self.placed: list[tuple[Request, int]] = []  # each member, and its node
        with self._cluster.what_if():
            self.succeeded = all(self._place(unit, member) for member in unit.members)
        if self.succeeded:
            self._drop_unneeded()

    @property
    def price(self) -> Price:
        return self._preemption.price(victim for victims in self.victims.values() for victim in victims)

    def _place(self, unit: Unit, member: Request) -> bool:
        found = find(self._cluster, member, self._at, self._among, self._preemption.backfill.allowing(member))
        if found is not None:
            node = self._cluster.node(found.index)
            self._cluster.put(with_placement(node, found.placement, member, self._at))
            self.placed.append((member, found.index))
            return True
        chosen = self._preemption.best_victims(unit, member, self._among)
        if chosen is None:
            return False
        index, victims = chosen
        all_victims = (*self.victims.get(index, ()), *victims.chosen)
        if not self._preemption.may_evict([*self._victims_elsewhere(index), *all_victims]):
            return False
        self.victims[index] = all_victims
        cleared = without(self._cluster.node(index), victims.chosen)
        offer = fitting_offers(cleared, member, self._at)[0]
        placed = placement(cleared, member, offer, self._at)
        self._cluster.put(with_placement(cleared, placed, member, self._at))
        self.placed.append((member, index))
        return True

    def _victims_elsewhere(self, index: int) -> list[Running]:
        return [each for other, victims in self.victims.items() if other != index for each in victims]

    def _drop_unneeded(self) -> None:
        """Spare victims that the evictions for a later member made unnecessary."""
        for index, victims in sorted(self.victims.items()):
            members = [member for member, node_index in self.placed if node_index == index]
            for victim in sorted(victims, key=lambda each: self._preemption.price([each]), reverse=True):
                fewer = tuple(each for each in self.victims[index] if each is not victim)
                if _all_fit(without(self._cluster.node(index), fewer), members, self._at):
                    self.victims[index] = fewer

    def slots(self) -> Iterator[BackfillSlot]:
        for member, index in self.placed:
            victims = frozenset(each.instance_id for each in self.victims.get(index, ()))
            yield BackfillSlot(member, index, self._at.now, victims)


def _all_fit(node: NodeView, members: Iterable[Request], at: PlanTime) -> bool:
    for member in members:
        after = with_request(node, member, at)
        if after is None:
            return False
        node = after
    return True


def _min_victims(node: NodeView, request: Request, victims: Sequence[Running]) -> int | None:
    """A lower bound for the number of victims, from amounts alone; None if all together do not suffice."""
    gpus = [gpu for gpu in passing(node.gpus, request) if gpu.healthy]
    free = sum(gpu.milli_free >= request.gpu_milli for gpu in gpus)
    # MIG devices are not counted: the result stays a lower bound.
    lacks = 0 if request.mig_profile is not None else request.gpu_count - free
    counts = [_parts_needed(lacks, [len(victim.allocations) for victim in victims])]
    for lacking, returned in filters.RULES.amounts:
        if (amount := lacking(node, request)) > 0:
            counts.append(_parts_needed(amount, [returned(victim) for victim in victims]))
    return None if None in counts else max(1, *(count for count in counts if count is not None))


def _parts_needed(amount: int, parts: list[int]) -> int | None:
    """How many of the largest parts add up to the amount; None if all together do not."""
    count = 0
    for part in sorted(parts, reverse=True):
        if amount <= 0:
            break
        amount -= part
        count += 1
    return count if amount <= 0 else None
