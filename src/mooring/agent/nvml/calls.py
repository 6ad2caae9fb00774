"""Calls NVML, and distinguishes failures of a call, of one GPU and of the whole node.

    unsupported (3, 13, 25, …)     null, and not called again
    fault of the GPU (15, 16, 28)  GpuFaultError
    fault of the node (1, 9, 18)   NodeFaultError
    anything else                  null this time

Imports pynvml and the standard library only: it runs in a process that has to stay small.
"""

from collections.abc import Callable
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

Call = Callable[..., Any]

# NVMLLibraryMismatchError is not an NVMLError: pynvml raises it where the driver lacks a versioned symbol.
# UnicodeDecodeError: pynvml decodes the driver's strings strictly.
FAILURES = (nvml.NVMLError, nvml.NVMLLibraryMismatchError, UnicodeDecodeError)

UNSUPPORTED = frozenset(
    {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        nvml.NVML_ERROR_DEPRECATED,
    }
)
GPU_FAULTS = frozenset(
    {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_GPU_NOT_FOUND}
)
NODE_FAULTS = frozenset(
    {
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
CODES = {
    nvml.NVML_ERROR_UNINITIALIZED: "uninitialized",
    nvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    nvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    nvml.NVML_ERROR_INSUFFICIENT_POWER: "insufficient_power",
    nvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver_not_loaded",
    nvml.NVML_ERROR_TIMEOUT: "timeout",
    nvml.NVML_ERROR_IRQ_ISSUE: "irq_issue",
    nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "library_not_found",
    nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "function_not_found",
    nvml.NVML_ERROR_CORRUPTED_INFOROM: "corrupted_inforom",
    nvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    nvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
    nvml.NVML_ERROR_OPERATING_SYSTEM: "operating_system",
    nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "version_mismatch",
    nvml.NVML_ERROR_MEMORY: "out_of_memory",
    nvml.NVML_ERROR_GPU_NOT_FOUND: "gpu_lost",
    nvml.NVML_ERROR_UNKNOWN: "unknown",
}


class GpuFaultError(Exception):
    """This GPU cannot be read; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class NodeFaultError(Exception):
    """No GPU of the node can be read; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NvmlGpu:
    """One opened GPU, and what this process remembers of it."""

    __slots__ = (
        "fault", "handle", "identity", "index", "mig_devices", "mig_mode", "mig_places", "readings",
        "remote_ends", "unsupported", "uuid",
    )  # fmt: skip

    def __init__(self, handle: Any, index: int, uuid: str, readings: tuple[Call, ...]) -> None:
        self.handle, self.index, self.uuid = handle, index, uuid
        self.readings = readings  # the calls of a sample; unsupported ones are removed
        self.unsupported: set[tuple[Any, ...]] = set()
        self.identity: dict[str, Any] = {}
        self.remote_ends: dict[int, tuple[int | None, str | None]] = {}  # of NVLink lanes
        self.mig_mode: str | None = None
        self.mig_devices: list[dict[str, Any]] = []  # of the last inventory
        # The UUIDs of MIG devices by their GPU instance and compute instance, with which events name them.
        self.mig_places: dict[tuple[int, int], str] = {}
        self.fault: str | None = None  # as of the last sample

    def ask(self, function: Call, *arguments: Any) -> Any:
        """The result of `function(handle, *arguments)`, or None; raises GpuFaultError and NodeFaultError."""
        call = (function, *arguments)
        if call in self.unsupported:
            return None
        try:
            return function(self.handle, *arguments)
        except FAILURES as failure:
            if is_unsupported(failure):
                self.unsupported.add(call)
            return None


def ask(function: Call, *arguments: Any) -> Any:
    """The result of a call that is not about one GPU, or None; raises NodeFaultError."""
    try:
        return function(*arguments)
    except FAILURES as failure:
        if number_of(failure) in NODE_FAULTS:
            raise node_fault(failure) from failure
        return None


def is_unsupported(failure: Exception) -> bool:
    """Whether the call is unsupported. Raises GpuFaultError or NodeFaultError for a fault."""
    number = number_of(failure)
    if number in GPU_FAULTS:
        raise GpuFaultError(code(number)) from failure
    if number in NODE_FAULTS:
        raise node_fault(failure) from failure
    return number in UNSUPPORTED


def node_fault(failure: Exception) -> NodeFaultError:
    number = number_of(failure)
    return NodeFaultError(code(number), message(number))


def number_of(failure: Exception) -> int:
    """NVML's number for any of FAILURES."""
    if isinstance(failure, nvml.NVMLError):
        return int(failure.value)
    mismatch = isinstance(failure, nvml.NVMLLibraryMismatchError)
    return int(nvml.NVML_ERROR_FUNCTION_NOT_FOUND if mismatch else nvml.NVML_ERROR_UNKNOWN)


def code(number: int) -> str:
    return CODES.get(number, f"nvml_error_{number}")


def message(number: int) -> str:
    """NVML's text from pynvml's table: the driver's own function could fail in turn."""
    known = nvml.NVMLError._errcode_to_string.get(number)
    return f"NVML: {known}" if known else f"NVML error {number}"


def _leniently_decoded(function: Call) -> Call:
    """The function with lenient instead of pynvml's strict decoding: the driver may return any bytes."""
    raw: Call = getattr(function, "__wrapped__", function)

    def text(*arguments: Any) -> str:
        answer = raw(*arguments)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)

    return text


device_name = _leniently_decoded(nvml.nvmlDeviceGetName)
device_uuid = _leniently_decoded(nvml.nvmlDeviceGetUUID)
driver_version = _leniently_decoded(nvml.nvmlSystemGetDriverVersion)
process_name = _leniently_decoded(nvml.nvmlSystemGetProcessName)
