"""The shapes in which GPU facts and samples leave the NVML child; `core/gpu.py` reads the same names.

Null means that the card, or the driver, does not tell. Times are RFC 3339 in UTC with milliseconds.
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
    """What rarely changes about one card."""

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
    recovery_action: str | None  # none, or what `fault` has; null: the driver does not tell
    conditions: list[str]  # row_remap_pending, page_retirement_pending: they stop no new work


class NvmlProcess(TypedDict):
    pid: int  # of the host
    name: str | None
    memory_used_mib: int | None
    mig_uuid: str | None  # the MIG device that it runs on; null on a card without


class NvmlMigSample(TypedDict):
    """The memory of one MIG device; more is not told of it."""

    uuid: str
    memory_used_mib: int | None
    memory_total_mib: int | None


class NvmlSample(TypedDict):
    """One reading of one card; memory used excludes what the driver reserves for itself."""

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
    processes: list[NvmlProcess] | None  # of its MIG devices, where it has some
    mig_devices: list[NvmlMigSample]


class GpuEvent(TypedDict):
    """Equal events of one card, counted; a null UUID may be any card of the node.

    `code`: xid_<number>, or one of nvml_events.CODES. No `mig_uuids`: it is of the whole card.
    """

    uuid: str | None
    code: str
    mig_uuids: list[str]
    count: int
    first_at: str
    last_at: str


class UnreadableGpu(TypedDict):
    """A card that the driver counts but that cannot be read; one that does not even open has no UUID.

    `code`: one of NVML's, odd_uuid, or memory_unknown (GB10 and Jetson, which have none of their own).
    """

    index: int
    uuid: str | None
    code: str


class NodeFault(TypedDict):
    """Why no card of the node can be read.

    `code`: driver_not_loaded, version_mismatch, no_permission, gpu_lost, unknown, … from NVML;
    not_read_yet, nvml_hung, nvml_ended (the child died) and wrong_binding from the agent.
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
    faults: dict[str, str]  # UUID -> gpu_lost or reset_required, as far as samples showed
    events: list[GpuEvent]  # since the answer before
    deaf: bool  # events are no longer heard: NVML must be started anew
