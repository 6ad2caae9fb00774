"""The shapes of GPU facts and samples from the NVML process, which stays small by not importing pydantic.

The models of `core/gpu.py` and of the client's `schemas/gpus.py` have the same names and types;
tests/agent/nvml/test_types.py compares them. Null means that the GPU or its driver does not report the value.
Times are RFC 3339 in UTC with milliseconds.
"""

from typing import TypedDict


class NvmlNvLinkPeer(TypedDict):
    uuid: str
    links: int


class NvmlMigDevice(TypedDict):
    uuid: str
    profile: str
    memory_mib: int | None


class NvmlGpuFacts(TypedDict):
    """The facts of one GPU, which rarely change."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    pci_bus_id: str | None
    minor_number: int | None
    numa_node: int | None
    nvlink_peers: list[NvmlNvLinkPeer]
    topology: dict[str, str]  # other GPU's UUID -> internal, single, multiple, hostbridge, node, system
    mig_mode: str | None  # enabled, disabled
    mig_devices: list[NvmlMigDevice]
    compute_capability: str | None
    power_limit_w: float | None
    fault: str | None  # gpu_lost, reset_required, row_remap_failed, recovery_…, memory_unknown
    recovery_action: str | None  # none, or as in `fault`
    conditions: list[str]  # row_remap_pending, page_retirement_pending: new work is allowed


class NvmlProcess(TypedDict):
    pid: int  # of the host
    name: str | None
    memory_used_mib: int | None
    mig_uuid: str | None  # the MIG device that it runs on


class NvmlMigSample(TypedDict):
    """The memory of one MIG device; the driver reports nothing else about it."""

    uuid: str
    memory_used_mib: int | None
    memory_total_mib: int | None


class NvmlSample(TypedDict):
    """One sample of one GPU. The memory used excludes what the driver reserves for itself."""

    uuid: str
    index: int
    sampled_at: str
    utilization_gpu_pct: float | None
    utilization_memory_pct: float | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    power_w: float | None  # Ampere and later, but not GA100: averaged over 1 s; else at this instant
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    fan_pct: float | None
    energy_j: float | None  # since the driver was loaded
    processes: list[NvmlProcess] | None  # including those of its MIG devices
    mig_devices: list[NvmlMigSample]


class GpuEvent(TypedDict):
    """Equal events of one GPU, counted; with a null UUID any GPU of the node may be meant.

    `code`: xid_<number>, or one of events.CODES. Without `mig_uuids` the whole GPU or an unknown MIG device
    is meant.
    """

    uuid: str | None
    code: str
    mig_uuids: list[str]
    count: int
    first_at: str
    last_at: str


class UnreadableGpu(TypedDict):
    """A GPU that the driver counts but that cannot be read; one that cannot be opened has no UUID.

    `code`: as from `calls.code`, odd_uuid, or memory_unknown (GB10 and Jetson have no memory of their own).
    """

    index: int
    uuid: str | None
    code: str


class NodeFault(TypedDict):
    """Why no GPU of the node can be read.

    `code`: driver_not_loaded, version_mismatch, no_permission, gpu_lost, unknown, … from NVML;
    not_read_yet, nvml_hung, nvml_ended (the child died), events_lost and wrong_binding from the agent.
    """

    code: str
    message: str


class NvmlInventory(TypedDict):
    driver_version: str | None
    cuda_version: str | None
    gpus: list[NvmlGpuFacts]
    unreadable: list[UnreadableGpu]


class NvmlSampleAnswer(TypedDict):
    samples: list[NvmlSample]
    faults: dict[str, str]  # UUID -> gpu_lost or reset_required, if the sample failed
    events: list[GpuEvent]  # since the previous answer
    deaf: bool  # no more events arrive: NVML must be initialised again
