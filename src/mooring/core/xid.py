"""The meaning of a GPU error code that a node reports: its severity and the required action.

Both depend on the code and on the recovery action that the driver requests (NVML field 230).

    catalogue: RESET_GPU, RESTART_BM, RESTART_VM, CHECK_MECHANICALS -> fatal, whatever the recovery action is
    catalogue: RESTART_APP, IGNORE, WORKFLOW_XID_45 -> never fatal: any user's program can cause these codes
    any other XID but 154 -> warning if the recovery action is `none`; fatal if not, or unknown (driver < 555)
    a code other than an XID -> as in `_KNOWN`, which includes the recovery actions; an unknown code is fatal
"""

import re
from dataclasses import dataclass
from typing import Final

from mooring.core.xid_catalogue import CATALOGUE
from mooring_client.schemas.gpus import Action, Severity


@dataclass(frozen=True, slots=True)
class GpuFault:
    """What a code means. `notify_instance`: the GPU stays in use, but the instance on it gets an event."""

    severity: Severity
    action: Action
    description: str
    notify_instance: bool = False

    @property
    def quarantines(self) -> bool:
        return self.severity is Severity.FATAL


NO_RECOVERY: Final = "none"  # the driver supports the recovery action, and requests none

_BY_CATALOGUE: Final = {
    "RESTART_APP": (Severity.INFO, Action.RESTART_APP),
    "IGNORE": (Severity.INFO, Action.NONE),
    # Sent when a program on the GPU ends because of another error, which has a code of its own.
    "WORKFLOW_XID_45": (Severity.INFO, Action.RESTART_APP),
    "RESET_GPU": (Severity.FATAL, Action.RESET),
    "RESTART_BM": (Severity.FATAL, Action.REBOOT),
    "RESTART_VM": (Severity.FATAL, Action.REBOOT),
    "CHECK_MECHANICALS": (Severity.FATAL, Action.SERVICE),
}
_UNDECIDED_ACTIONS: Final = {
    "WORKFLOW_XID_48": Action.RESET,
    "WORKFLOW_NVLINK_ERR": Action.RESET,
    "WORKFLOW_NVLINK5_ERR": Action.RESET,
}
_SINGLE_BIT_ERRORS: Final = 92
_RECOVERY_ACTION_CHANGED: Final = 154

_RESET, _REBOOT, _SERVICE = (
    (Severity.FATAL, action) for action in (Action.RESET, Action.REBOOT, Action.SERVICE)
)
_KNOWN: Final = {
    # From the inventory.
    "gpu_lost": (*_REBOOT, "The GPU has fallen off the bus"),
    "gpu_missing": (*_SERVICE, "The node no longer lists the GPU"),
    "gpu_returned": (Severity.FATAL, Action.NONE, "The GPU was lost and has returned"),
    "reset_required": (*_RESET, "The driver requests a GPU reset"),
    "recovery_drain_p2p": (*_RESET, "The driver requests that peer-to-peer traffic is drained"),
    "recovery_drain_and_reset": (*_RESET, "The driver requests that the GPU is drained and reset"),
    "recovery_bus_reset": (*_RESET, "The driver requests a reset of the GPU's PCIe bus"),
    "recovery_node_reboot": (*_REBOOT, "The driver requests a reboot of the node"),
    "recovery_system_reboot": (*_REBOOT, "The driver requests a reboot of the system"),
    "recovery_imex_domain": (*_SERVICE, "The driver requests a recovery of the IMEX domain"),
    "row_remap_failed": (*_SERVICE, "The GPU's memory has more faults than spare rows"),
    "row_remap_pending": (Severity.WARN, Action.RESET, "Memory rows are remapped at the next reset"),
    "page_retirement_pending": (Severity.WARN, Action.RESET, "Memory pages are retired at the next reset"),
    # NVML events other than XIDs.
    "gpu_unavailable": (*_RESET, "The driver reports that the GPU is unavailable"),
    "fatal_poison": (*_RESET, "Fatal memory poison"),
    "nonfatal_poison": (Severity.INFO, Action.RESTART_APP, "Contained memory poison"),
    "dram_retirement": (Severity.INFO, Action.NONE, "GPU memory remapping event"),
    "dram_retirement_failure": (*_RESET, "GPU memory remapping failure"),
    "ecc_error_storm": (Severity.WARN, Action.NONE, "High rate of corrected memory errors"),
    # From the agent.
    "gpu_not_released": (
        *_RESET,
        "Processes or memory of an ended container remain on the GPU",
    ),
    "gpu_mismatch": (*_SERVICE, "A container got this GPU instead of the one assigned to it"),
}
_XID: Final = re.compile(r"xid_(\d{1,10})", re.ASCII)


def classify(code: str, recovery_action: str | None) -> GpuFault:
    """Return the fault that a reported code means.

    Args:
        recovery_action: what the driver requests; "none": nothing; null: the driver does not report it.
    """
    if match := _XID.fullmatch(code):
        return classify_xid(int(match[1]), recovery_action)
    severity, action, description = _KNOWN.get(code, (*_SERVICE, "Unknown fault"))
    return GpuFault(severity, action, description, notify_instance=action is Action.RESTART_APP)


def classify_xid(number: int, recovery_action: str | None) -> GpuFault:
    entry = CATALOGUE.get(number)
    description = entry.description if entry else "Unknown XID"
    if number == _RECOVERY_ACTION_CHANGED:
        return GpuFault(Severity.INFO, Action.NONE, description)
    if number == _SINGLE_BIT_ERRORS:
        return GpuFault(Severity.WARN, Action.NONE, description)
    immediate = entry.immediate if entry else ""
    if immediate in _BY_CATALOGUE:
        severity, action = _BY_CATALOGUE[immediate]
        return GpuFault(severity, action, description, notify_instance=severity is Severity.INFO)
    severity = Severity.WARN if recovery_action == NO_RECOVERY else Severity.FATAL
    return GpuFault(severity, _UNDECIDED_ACTIONS.get(immediate, Action.SERVICE), description)
