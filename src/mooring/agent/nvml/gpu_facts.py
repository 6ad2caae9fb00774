"""Reads the facts of each GPU: identity, links to other GPUs, MIG devices and health."""

from itertools import combinations
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml import mig
from mooring.agent.nvml.calls import GpuFaultError, NvmlGpu, ask, device_name, driver_version
from mooring.agent.nvml.samples import READINGS

Facts = dict[str, Any]
Link = tuple[int | None, str | None]  # NVML_NVLINK_DEVICE_TYPE_… and the PCI bus id at the far end

NUMA_WORDS = 16  # of 64 bits: more nodes than any machine has

MIG_MODES = {nvml.NVML_DEVICE_MIG_DISABLE: "disabled", nvml.NVML_DEVICE_MIG_ENABLE: mig.ENABLED}
TOPOLOGY = {
    nvml.NVML_TOPOLOGY_INTERNAL: "internal",
    nvml.NVML_TOPOLOGY_SINGLE: "single",
    nvml.NVML_TOPOLOGY_MULTIPLE: "multiple",
    nvml.NVML_TOPOLOGY_HOSTBRIDGE: "hostbridge",
    nvml.NVML_TOPOLOGY_NODE: "node",
    nvml.NVML_TOPOLOGY_SYSTEM: "system",
}
RECOVERY_ACTIONS = {
    nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "reset_required",
    nvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "recovery_node_reboot",
    nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "recovery_drain_p2p",
    nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "recovery_drain_and_reset",
    nvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "recovery_imex_domain",
    nvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "recovery_bus_reset",
    nvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "recovery_system_reboot",
}
NO_RECOVERY = "none"


def versions() -> dict[str, str | None]:
    """The versions of the driver (`580.95.05`) and of the newest CUDA that it supports (`13.0`)."""
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver_version": ask(driver_version),
        "cuda_version": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


class _GpuWithLinks:
    """A GPU, its facts, and the remote ends of its active NVLink lanes."""

    __slots__ = ("facts", "gpu", "links")

    def __init__(self, gpu: NvmlGpu) -> None:
        self.gpu, self.facts, self.links = gpu, _facts(gpu), _active_links(gpu)


def read(gpus: list[NvmlGpu]) -> tuple[list[Facts], list[dict[str, Any]]]:
    """The facts of every readable GPU; index, UUID and error code of the others."""
    readable: list[_GpuWithLinks] = []
    unreadable: list[dict[str, Any]] = []
    for gpu in gpus:
        try:
            readable.append(_GpuWithLinks(gpu))
        except GpuFaultError as fault:
            unreadable.append({"index": gpu.index, "uuid": gpu.uuid, "code": fault.code})
    for one, other in combinations(readable, 2):
        _join(one, other)
    return [each.facts for each in readable], unreadable


def _facts(gpu: NvmlGpu) -> Facts:
    limit_mw = gpu.ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    identity = _completed(gpu, _identity(gpu))
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        **identity,
        "nvlink_peers": [],
        "topology": {},
        "mig_mode": _mig_mode(gpu),
        "mig_devices": mig.devices(gpu, identity["memory_mib"]),
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        **_health(gpu),
    }


def _identity(gpu: NvmlGpu) -> Facts:
    """Facts that do not change while the driver is loaded."""
    capability = gpu.ask(nvml.nvmlDeviceGetCudaComputeCapability)
    return {
        "model": gpu.ask(device_name),
        "memory_mib": _memory_mib(gpu),
        "pci_bus_id": gpu.ask(_bus_id),
        "minor_number": gpu.ask(nvml.nvmlDeviceGetMinorNumber),
        "numa_node": _numa_node(gpu),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
    }


def _completed(gpu: NvmlGpu, identity: Facts) -> Facts:
    """This identity, with the value of an earlier reading for each that could not be read now."""
    for name, value in identity.items():
        if value is not None:
            gpu.identity[name] = value
    if "memory_mib" not in gpu.identity:
        raise GpuFaultError("memory_unknown")  # the scheduler needs it
    return {**identity, "model": "unknown", **gpu.identity}


def _memory_mib(gpu: NvmlGpu) -> int | None:
    memory = gpu.ask(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or gpu.ask(
        nvml.nvmlDeviceGetMemoryInfo
    )
    return None if memory is None else memory.total >> 20


def _bus_id(handle: Any) -> str:
    return str(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _numa_node(gpu: NvmlGpu) -> int | None:
    """The host's NUMA node next to the GPU, if it is a single one.

    Not nvmlDeviceGetNumaNodeId: on Grace Hopper that is the node of the GPU's own memory.
    """
    words = gpu.ask(nvml.nvmlDeviceGetMemoryAffinity, NUMA_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    mask = sum(word << 64 * place for place, word in enumerate(words or ()))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _mig_mode(gpu: NvmlGpu) -> str | None:
    """A GPU with MIG enabled supports other calls, so a change resets what is known to be unsupported."""
    modes = gpu.ask(nvml.nvmlDeviceGetMigMode)
    mode = gpu.mig_mode if modes is None else MIG_MODES.get(modes[0])
    if gpu.mig_mode not in {None, mode}:
        gpu.readings = READINGS
        gpu.unsupported.clear()
    gpu.mig_mode = mode
    return mode


def _health(gpu: NvmlGpu) -> Facts:
    """`fault`: the first reason why the GPU must not be used; None: none is known.

    `conditions` do not prevent new work: for example, pending rows are remapped at the next reset.
    """
    _corrected, _uncorrected, pending, failed = gpu.ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    retiring = gpu.ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)  # Volta and earlier
    action = _recovery_action(gpu)
    needed = action if action != NO_RECOVERY else None
    return {
        "fault": gpu.fault or needed or ("row_remap_failed" if failed else None),
        "recovery_action": action,
        "conditions": [
            *(["row_remap_pending"] if pending else []),
            *(["page_retirement_pending"] if retiring == nvml.NVML_FEATURE_ENABLED else []),
        ],
    }


def _recovery_action(gpu: NvmlGpu) -> str | None:
    """The recovery action that the driver (555 and later) requests; None: unknown.

    An action that this release of Mooring does not know counts as a fault too.
    """
    fields = gpu.ask(nvml.nvmlDeviceGetFieldValues, (nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,))
    if fields is None or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    number = fields[0].value.uiVal
    if number == nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return NO_RECOVERY
    return RECOVERY_ACTIONS.get(number, f"recovery_action_{number}")


def _active_links(gpu: NvmlGpu) -> list[Link]:
    return [_remote_end(gpu, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_up(gpu, link)]


def _is_up(gpu: NvmlGpu, link: int) -> bool:
    return bool(gpu.ask(nvml.nvmlDeviceGetNvLinkState, link) == nvml.NVML_FEATURE_ENABLED)


def _remote_end(gpu: NvmlGpu, link: int) -> Link:
    if link not in gpu.remote_ends:
        kind = gpu.ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        gpu.remote_ends[link] = (kind, gpu.ask(_remote_bus_id, link))
    return gpu.remote_ends[link]


def _remote_bus_id(handle: Any, link: int) -> str:
    return str(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)


def _join(one: _GpuWithLinks, other: _GpuWithLinks) -> None:
    """Add the topology and the NVLink lanes between two GPUs to the facts of both."""
    level = TOPOLOGY.get(ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one.gpu.handle, other.gpu.handle))
    lanes = min(_lanes(one, other), _lanes(other, one))
    for gpu, peer in ((one, other), (other, one)):
        if level is not None:
            gpu.facts["topology"][peer.facts["uuid"]] = level
        if lanes:
            gpu.facts["nvlink_peers"].append({"uuid": peer.facts["uuid"], "links": lanes})


def _lanes(gpu: _GpuWithLinks, peer: _GpuWithLinks) -> int:
    """The number of lanes to the peer, else to switches, as in `nvidia-smi topo`."""
    direct: int = sum(bus_id == peer.facts["pci_bus_id"] for _, bus_id in gpu.links)
    switched: int = sum(kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH for kind, _ in gpu.links)
    return direct or switched
