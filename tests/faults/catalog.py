"""All faults."""

from tests.faults import agents, clocks, control_plane, database, disks, engines, gpus, network
from tests.faults.trial import Fault

_MODULES = (control_plane, agents, engines, database, network, clocks, disks, gpus)
ALL: tuple[Fault, ...] = tuple(
    sorted((fault for module in _MODULES for fault in module.FAULTS), key=lambda fault: int(fault.number[1:]))
)


def chosen(numbers: set[str]) -> list[Fault]:
    """The faults with these numbers. Raises LookupError if a number is unknown."""
    if unknown := numbers - {fault.number for fault in ALL}:
        raise LookupError(f"no such fault: {', '.join(sorted(unknown))}")
    return [fault for fault in ALL if not numbers or fault.number in numbers]
