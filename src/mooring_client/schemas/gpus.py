"""GPUs: their health, the severity of their faults, and live samples."""

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mooring_client.schemas.text import GpuUuid, Text, printable

# The largest that clients in other languages can read.
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


LONGEST_LIST = 10_000


class Health(StrEnum):
    HEALTHY = "healthy"
    QUARANTINED = "quarantined"  # present, but not allocated until an admin or a self-test clears it
    LOST = "lost"  # the node no longer lists the GPU, or the driver reports that it fell off the bus


class Severity(StrEnum):
    INFO = "info"  # an application fault or a notice: the GPU stays in use
    WARN = "warn"  # the GPU is allocated last
    FATAL = "fatal"  # the GPU is quarantined


class Action(StrEnum):
    NONE = "none"
    RESTART_APP = "restart_app"
    RESET = "reset"
    REBOOT = "reboot"
    SERVICE = "service"


class GpuFact(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class NvLinkPeer(GpuFact):
    uuid: GpuUuid
    links: Annotated[Integer, Field(ge=1, description="NVLink lanes between the two GPUs")]


class Process(GpuFact):
    pid: Annotated[Integer, Field(description="on the node, not in the container")]
    name: Annotated[Text | None, AfterValidator(lambda name: printable(name) if name else name)]
    memory_used_mib: Integer | None
    instance_id: Text | None = None
    mig_uuid: Annotated[Text | None, Field(description="the MIG device that the process runs on")] = None


class MigSample(GpuFact):
    """Memory of one MIG device; the driver reports no utilization for GPUs in MIG mode."""

    uuid: GpuUuid
    memory_used_mib: Integer | None
    memory_total_mib: Integer | None


class Sample(GpuFact):
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
