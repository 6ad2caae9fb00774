"""The disk of a simulated engine."""

from mooring.agent.disk.storage import DiskPolicy
from mooring.core.disk import DiskFacts


def simulated_disk(total_mib: int) -> DiskFacts:
    return DiskFacts(
        total_mib=total_mib,
        allocatable_mib=DiskPolicy().allocatable_mib(total_mib),
        available_mib=total_mib,
        enforced=True,
        driver="simulated",
    )
