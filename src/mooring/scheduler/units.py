"""Units of scheduling: a single request, or the pending members of a gang."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Gang, Quota, Request


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
    def gpu_milli(self) -> int:
        return sum(map(gpu_milli, self.members))

    def with_quota(self, quotas: Mapping[str, Quota]) -> "Unit":
        """The unit with its project's current quota."""
        quota = quotas.get(self.project_id)
        if all(quota is member.quota for member in self.members):
            return self
        return Unit(tuple(replace(member, quota=quota) for member in self.members))


def units_of(requests: Iterable[Request]) -> list[Unit]:
    """Group the requests into units; the result does not depend on their order."""
    units: list[Unit] = []
    gangs: dict[str, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.instance_id):
        if request.gang is None:
            units.append(Unit((request,)))
        else:
            gangs.setdefault(request.gang.group_id, []).append(request)
    return units + [Unit(tuple(members)) for _group, members in sorted(gangs.items())]
