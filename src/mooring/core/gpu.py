"""A GPU: facts from NVML's inventory, live samples, the size of MIG devices, and matching of models."""

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mooring.core.text import GpuUuid, Text, printable

# The largest that clients in other languages can read.
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
LONGEST_LIST = 10_000  # of a report


class Health(StrEnum):
    HEALTHY = "healthy"
    QUARANTINED = "quarantined"  # present, but not allocated until an admin or a self-test clears it
    LOST = "lost"  # the node no longer lists the GPU, or the driver reports that it fell off the bus


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class NvLinkPeer(_Fact):
    uuid: GpuUuid
    links: Annotated[Integer, Field(ge=1, description="NVLink lanes between the two GPUs")]


class MigDevice(_Fact):
    uuid: GpuUuid
    profile: Text
    memory_mib: Integer | None


class GpuFacts(_Fact):
    """What the node reports about one GPU. Null: the GPU or its driver does not report it."""

    uuid: GpuUuid
    index: Annotated[
        int, Field(ge=0, lt=2**31, description="NVML's order, for display only: it may change at a reboot")
    ]
    model: Text
    memory_mib: Annotated[int, Field(ge=0, lt=2**31)]
    pci_bus_id: Text | None = None
    minor_number: Integer | None = None
    numa_node: Integer | None = None
    nvlink_peers: Annotated[list[NvLinkPeer], Field(max_length=LONGEST_LIST)] = []
    topology: Annotated[
        dict[str, Text],
        Field(description="UUID of another GPU -> nearest common ancestor: internal … system"),
    ] = {}
    mig_mode: Text | None = None
    mig_devices: Annotated[list[MigDevice], Field(max_length=LONGEST_LIST)] = []
    compute_capability: Text | None = None
    power_limit_w: float | None = None
    fault: Annotated[Text | None, Field(description="why it is unusable: gpu_lost, reset_required, …")] = None
    recovery_action: Annotated[
        Text | None, Field(description="action that the driver asks for: none, reset_required, …")
    ] = None
    conditions: Annotated[
        list[Text],
        Field(max_length=16, description="faults that block no new instances: row_remap_pending, …"),
    ] = []


class Process(_Fact):
    pid: Annotated[Integer, Field(description="on the node, not in the container")]
    name: Annotated[Text | None, AfterValidator(lambda name: printable(name) if name else name)]
    memory_used_mib: Integer | None
    instance_id: Text | None = None
    mig_uuid: Annotated[Text | None, Field(description="the MIG device that the process runs on")] = None


class MigSample(_Fact):
    """Memory of one MIG device; the driver reports no utilization for GPUs in MIG mode."""

    uuid: GpuUuid
    memory_used_mib: Integer | None
    memory_total_mib: Integer | None


class Sample(_Fact):
    """One reading of one GPU. Values that the GPU does not support are null, never 0."""

    uuid: GpuUuid
    index: Integer
    sampled_at: Text
    utilization_gpu_pct: float | None = None
    utilization_memory_pct: float | None = None
    memory_used_mib: Integer | None = None
    memory_total_mib: Integer | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: Integer | None = None
    memory_clock_mhz: Integer | None = None
    fan_pct: float | None = None
    energy_j: Annotated[float | None, Field(description="since the driver was loaded")] = None
    processes: Annotated[list[Process], Field(max_length=LONGEST_LIST)] | None = None
    mig_devices: Annotated[list[MigSample], Field(max_length=LONGEST_LIST)] = []


def mig_milli(profile: str) -> int:
    """The size of a MIG device in thousandths of its GPU: compute slices divided by seven, rounded down.

    All GPUs but the A30 (four) have seven slices, so all devices of a GPU add up to at most the whole GPU. A
    compute instance within a device (`1c.3g.20gb`) counts by its own slices. A profile that cannot be parsed,
    from an older agent, counts as the whole GPU.
    """
    slices = re.match(r"(\d{1,2})[cg]", profile)
    return max(1, min(1000, 1000 * int(slices[1]) // 7)) if slices else 1000


def model_matches(wanted: str | None, model: str) -> bool:
    """Whether every requested word is a word of the NVML name: `A10` does not match an `A100`."""
    return wanted is None or _words(wanted) <= _words(model)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9.]+", name.lower()))
