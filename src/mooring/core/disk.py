"""Disk space of nodes and instances: what a node reports, and what an instance counts as.

An instance writes to its container's own layer. `disk_mib` limits that layer where the node's storage driver
can enforce it, and is reserved by the scheduler on every node that reports its disk.
"""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from mooring.core.text import Text

# What an instance without `disk_mib` counts as, and is limited to. On a small node it is a 32nd of the
# allocatable disk, so that such a node is not full after a handful of instances.
DEFAULT_DISK_MIB: Final = 10 * 1024
SMALLEST_SHARES: Final = 32


class DiskFacts(BaseModel):
    """What an agent reports about the filesystem that holds its engine's containers and images."""

    model_config = ConfigDict(frozen=True)

    total_mib: Annotated[int, Field(ge=0, lt=2**40)]
    allocatable_mib: Annotated[int, Field(ge=0, lt=2**40, description="what instances may have of it")]
    available_mib: Annotated[int, Field(ge=0, lt=2**40, description="free now, in coarse steps")]
    images_mib: Annotated[int, Field(ge=0, lt=2**40, description="the images' sizes, added up")] = 0
    enforced: Annotated[bool, Field(description="the engine limits what a container writes")] = False
    driver: Text
    filesystem: Text | None = None
    pressure: Annotated[bool, Field(description="so little is free that nothing new is placed")] = False


def default_disk_mib(allocatable_mib: int | None) -> int:
    """What an instance without `disk_mib` is given on a node; null: the node does not report its disk."""
    if allocatable_mib is None:
        return DEFAULT_DISK_MIB
    return min(DEFAULT_DISK_MIB, allocatable_mib // SMALLEST_SHARES)
