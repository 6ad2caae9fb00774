"""Disk space: what a node reports, and what an instance takes.

An instance writes to its container's own layer. `disk_mib` limits that layer if the node's storage driver can
enforce a limit. The scheduler counts `disk_mib` on every node that reports its disk, enforced or not.
"""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from mooring_client.schemas.text import Text

# The limit of an instance without `disk_mib`; on a small node, a 32nd of the allocatable disk, so that a few
# instances do not fill the node.
DEFAULT_DISK_MIB: Final = 10 * 1024
SMALL_NODE_DIVISOR: Final = 32


class DiskFacts(BaseModel):
    """The filesystem of the engine's containers and images, as the agent reports it."""

    model_config = ConfigDict(frozen=True)

    total_mib: Annotated[int, Field(ge=0, lt=2**40)]
    allocatable_mib: Annotated[int, Field(ge=0, lt=2**40, description="available to instances")]
    available_mib: Annotated[int, Field(ge=0, lt=2**40, description="free now, coarsely rounded")]
    images_mib: Annotated[int, Field(ge=0, lt=2**40, description="sum of the images' sizes")] = 0
    enforced: Annotated[bool, Field(description="the engine limits what a container writes")] = False
    driver: Text
    filesystem: Text | None = None
    pressure: Annotated[bool, Field(description="too little is free to place new instances")] = False


def default_disk_mib(allocatable_mib: int | None) -> int:
    """The limit of an instance without `disk_mib` on a node; null: the node does not report its disk."""
    if allocatable_mib is None:
        return DEFAULT_DISK_MIB
    return min(DEFAULT_DISK_MIB, allocatable_mib // SMALL_NODE_DIVISOR)
