"""Units of scheduling: a single request, or the pending members of a gang."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from mooring.scheduler.differences import differences
from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Gang, Quota, Request
from mooring.scheduler.packing import search
from mooring.scheduler.packing.search import Key

Age = tuple[float, str]  # when the unit was queued, and the id of its first member; the oldest is the lowest


@dataclass(frozen=True, slots=True)
class Unit:
    """Placed as a whole or not at all. Its members are of one project."""

    members: tuple[Request, ...]  # by id

    @property
    def gang(self) -> Gang | None:
        return self.members[0].gang

    @property
    def first(self) -> Request:
        return self.members[0]

    @property
    def project_id(self) -> str:
        return self.first.project_id

    @property
    def priority(self) -> int:
        return min(member.priority for member in self.members)

    @property
    def queued_at(self) -> float:
        """When the oldest member was queued: a restarted member counts as having waited since then."""
        return min(member.queued_at for member in self.members)

    @property
    def age(self) -> Age:
        return self.queued_at, self.first.instance_id

    @property
    def gpu_milli(self) -> int:
        return sum(map(gpu_milli, self.members))

    def with_quota(self, quotas: Mapping[str, Quota]) -> "Unit":
        """The unit with its project's current quota."""
        quota = quotas.get(self.project_id)
        if all(quota is member.quota for member in self.members):
            return self
        return Unit(tuple(replace(member, quota=quota) for member in self.members))


@dataclass(slots=True)
class EqualUnits:
    """Units that differ only in their age and id: what keeps one of them pending keeps all of them pending.

    A gang is equal to no other unit.
    """

    key: Key
    units: list[Unit] = field(default_factory=list)  # the oldest first
    ages: list[Age] = field(default_factory=list)  # of `units`
    _queued: tuple[Age, ...] | None = None
    _ids: tuple[str, ...] | None = None

    @property
    def queued(self) -> tuple[Age, ...]:
        """When each member was queued, and its id. The same object until a unit is added or removed."""
        if self._queued is None:
            gang = self.units[0].members if self.units[0].gang else ()
            self._queued = tuple((each.queued_at, each.instance_id) for each in gang) or tuple(self.ages)
        return self._queued

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all members."""
        if self._ids is None:
            self._ids = tuple(instance_id for _since, instance_id in self.queued)
        return self._ids

    def place_of(self, instance_id: str) -> int:
        """The index in `units` of the unit of this instance."""
        return self.ids.index(instance_id) if self.units[0].gang is None else 0

    def add(self, unit: Unit) -> None:
        self._queued = self._ids = None
        self.units.insert(bisect_left(self.ages, unit.age), unit)
        insort(self.ages, unit.age)

    def remove(self, unit: Unit) -> None:
        self._queued = self._ids = None
        index = bisect_left(self.ages, unit.age)
        del self.units[index], self.ages[index]


class PendingUnits:
    """The units of the pending requests, updated by what has changed since the previous snapshot.

    A long queue changes little between two scheduling cycles, and has many equal requests.
    """

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._equal: dict[Key, EqualUnits] = {}
        self._keys: dict[str, Key] = {}  # of the unit of each request
        self._gangs: dict[str, Unit] = {}

    def __iter__(self) -> Iterator[EqualUnits]:
        return iter(self._equal.values())

    def update(self, requests: Sequence[Request]) -> None:
        """Replace the requests by those of the snapshot. One that did not change is the same object."""
        if requests is self._requests:
            return
        gone, new = differences(self._requests, requests)
        self._requests = requests
        changed_gangs = {each.gang.group_id for each in (*gone, *new) if each.gang}
        for group_id in self._gangs.keys() & changed_gangs:
            self._remove(self._gangs.pop(group_id))
        for request in gone:
            if request.gang is None:
                self._remove(Unit((request,)))
        for request in new:
            if request.gang is None:
                self._add((search.key(request), request.priority), Unit((request,)))
        for group_id, members in self._members_of(changed_gangs).items():
            self._gangs[group_id] = Unit(tuple(sorted(members, key=attrgetter("instance_id"))))
            self._add(("gang", group_id), self._gangs[group_id])

    def equal_to(self, instance_id: str) -> EqualUnits | None:
        """The units that are equal to that of this instance, with its own; None: it is not pending."""
        key = self._keys.get(instance_id)
        return None if key is None else self._equal[key]

    def _members_of(self, gangs: set[str]) -> Mapping[str, Sequence[Request]]:
        members: dict[str, list[Request]] = {}
        for request in self._requests if gangs else ():
            if request.gang is not None and request.gang.group_id in gangs:
                members.setdefault(request.gang.group_id, []).append(request)
        return members

    def _add(self, key: Key, unit: Unit) -> None:
        if key not in self._equal:
            self._equal[key] = EqualUnits(key)
        self._equal[key].add(unit)
        for member in unit.members:
            self._keys[member.instance_id] = key

    def _remove(self, unit: Unit) -> None:
        key = self._keys[unit.first.instance_id]
        for member in unit.members:
            del self._keys[member.instance_id]
        self._equal[key].remove(unit)
        if not self._equal[key].units:
            del self._equal[key]
