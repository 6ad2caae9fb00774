"""The facts of each card: what it is, what it is joined to, how it is cut up, and whether it is well."""

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
    """Of the driver (`580.95.05`) and the newest CUDA that it runs (`13.0`)."""
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver_version": ask(driver_version),
        "cuda_version": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


class Described:
    """A card, its facts, and the far ends of its NVLink lanes that are up."""

    __slots__ = ("facts", "gpu", "links")

    def __init__(self, gpu: NvmlGpu) -> None:
        self.gpu, self.facts, self.links = gpu, _facts(gpu), _links(gpu)


def read(gpus: list[NvmlGpu]) -> tuple[list[Facts], list[dict[str, Any]]]:
    """The facts of every card that tells them; of the others the index, UUID and error code."""
    known: list[Described] = []
    unreadable: list[dict[str, Any]] = []
    for gpu in gpus:
        try:
            known.append(Described(gpu))
        except GpuFaultError as fault:
            unreadable.append({"index": gpu.index, "uuid": gpu.uuid, "code": fault.code})
    for one, other in combinations(known, 2):
        _join(one, other)
    return [card.facts for card in known], unreadable


def _facts(gpu: NvmlGpu) -> Facts:
    limit_mw = gpu.ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    identity = _remembered(gpu, _identity(gpu))
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
    """What stays as it is for as long as the driver is loaded."""
    capability = gpu.ask(nvml.nvmlDeviceGetCudaComputeCapability)
    return {
        "model": gpu.ask(device_name),
        "memory_mib": _memory_mib(gpu),
        "pci_bus_id": gpu.ask(_bus_id),
        "minor_number": gpu.ask(nvml.nvmlDeviceGetMinorNumber),
        "numa_node": _numa_node(gpu),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
    }


def _remembered(gpu: NvmlGpu, identity: Facts) -> Facts:
    """With what an earlier reading told where this one, for once, did not."""
    for name, value in identity.items():
        if value is not None:
            gpu.identity[name] = value
    if "memory_mib" not in gpu.identity:
        raise GpuFaultError("memory_unknown")  # it could be given to nobody who asks for an amount
    return {**identity, "model": "unknown", **gpu.identity}


def _memory_mib(gpu: NvmlGpu) -> int | None:
    memory = gpu.ask(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or gpu.ask(
        nvml.nvmlDeviceGetMemoryInfo
    )
    return None if memory is None else memory.total >> 20


def _bus_id(handle: Any) -> str:
    return str(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _numa_node(gpu: NvmlGpu) -> int | None:
    """The host's node next to the card, if it is one.

    Not nvmlDeviceGetNumaNodeId: that is the node which the card's own memory is, on Grace Hopper.
    """
    words = gpu.ask(nvml.nvmlDeviceGetMemoryAffinity, NUMA_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    mask = sum(word << 64 * place for place, word in enumerate(words or ()))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _mig_mode(gpu: NvmlGpu) -> str | None:
    """With MIG on, cards do not support what they did before, so a change forgets what was learnt."""
    modes = gpu.ask(nvml.nvmlDeviceGetMigMode)
    mode = gpu.mig_mode if modes is None else MIG_MODES.get(modes[0])
    if gpu.mig_mode not in {None, mode}:
        gpu.readings = READINGS
        gpu.unsupported.clear()
    gpu.mig_mode = mode
    return mode


def _health(gpu: NvmlGpu) -> Facts:
    """`fault`: the first reason why the card should not be given out; None: it is well, as far as it tells.

    `conditions` do not stop new work (NVIDIA: rows that wait to be remapped are remapped at the next reset).
    """
    _corrected, _uncorrected, pending, failed = gpu.ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    retiring = gpu.ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)  # Volta and earlier
    wanted = _recovery_action(gpu)
    asked_for = wanted if wanted != NO_RECOVERY else None
    return {
        "fault": gpu.fault or asked_for or ("row_remap_failed" if failed else None),
        "recovery_action": wanted,
        "conditions": [
            *(["row_remap_pending"] if pending else []),
            *(["page_retirement_pending"] if retiring == nvml.NVML_FEATURE_ENABLED else []),
        ],
    }


def _recovery_action(gpu: NvmlGpu) -> str | None:
    """What the driver (555 and later) wants done; None: it does not tell.

    An action that this release does not know is still one: the card is not well.
    """
    fields = gpu.ask(nvml.nvmlDeviceGetFieldValues, (nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,))
    if fields is None or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    number = fields[0].value.uiVal
    if number == nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return NO_RECOVERY
    return RECOVERY_ACTIONS.get(number, f"recovery_action_{number}")


def _links(gpu: NvmlGpu) -> list[Link]:
    return [_far_end(gpu, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_up(gpu, link)]


def _is_up(gpu: NvmlGpu, link: int) -> bool:
    return bool(gpu.ask(nvml.nvmlDeviceGetNvLinkState, link) == nvml.NVML_FEATURE_ENABLED)


def _far_end(gpu: NvmlGpu, link: int) -> Link:
    if link not in gpu.far_ends:
        kind = gpu.ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        gpu.far_ends[link] = (kind, gpu.ask(_remote_bus_id, link))
    return gpu.far_ends[link]


def _remote_bus_id(handle: Any, link: int) -> str:
    return str(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)


def _join(one: Described, other: Described) -> None:
    """Writes into both what lies between them."""
    level = TOPOLOGY.get(ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one.gpu.handle, other.gpu.handle))
    lanes = min(_lanes(one, other), _lanes(other, one))
    for card, peer in ((one, other), (other, one)):
        if level is not None:
            card.facts["topology"][peer.facts["uuid"]] = level
        if lanes:
            card.facts["nvlink_peers"].append({"uuid": peer.facts["uuid"], "links": lanes})


def _lanes(card: Described, peer: Described) -> int:
    """Lanes that end at the other card, else those that end at a switch: so does `nvidia-smi topo` count."""
    direct: int = sum(bus_id == peer.facts["pci_bus_id"] for _, bus_id in card.links)
    switched: int = sum(kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH for kind, _ in card.links)
    return direct or switched
