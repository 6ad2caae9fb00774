"""What is placed as one: a request alone, or the members of a gang that wait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Gang, Quota, Request


@dataclass(frozen=True, slots=True)
class Unit:
    """Placed all together or not at all. Members of a gang are alike in project and priority."""

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
        """Its oldest member's: one that was restarted has waited as long as the gang has run."""
        return min(member.queued_at for member in self.members)

    @property
    def gpu_milli(self) -> int:
        return sum(map(gpu_milli, self.members))

    def limited(self, quotas: Mapping[str, Quota]) -> "Unit":
        """With what the project's quota is by now."""
        quota = quotas.get(self.project_id)
        if all(quota is member.quota for member in self.members):
            return self
        return Unit(tuple(replace(member, quota=quota) for member in self.members))


def units_of(requests: Iterable[Request]) -> list[Unit]:
    """Every request is in one; the order does not depend on theirs."""
    units: list[Unit] = []
    gangs: dict[str, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.instance_id):
        if request.gang is None:
            units.append(Unit((request,)))
        else:
            gangs.setdefault(request.gang.group_id, []).append(request)
    return units + [Unit(tuple(members)) for _group, members in sorted(gangs.items())]
