"""A GPU: facts from NVML's inventory, live samples, the size of MIG devices, and matching of models."""

import re
from typing import Annotated

from pydantic import Field

from mooring_client.schemas.gpus import LONGEST_LIST, GpuFact, Integer, NvLinkPeer
from mooring_client.schemas.text import GpuUuid, Text


class MigDevice(GpuFact):
    uuid: GpuUuid
    profile: Text
    memory_mib: Integer | None


class GpuFacts(GpuFact):
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


def model_matches(wanted: str | None, model: str) -> bool:
    """Whether every requested word is a word of the NVML name: `A10` does not match an `A100`."""
    return wanted is None or _words(wanted) <= _words(model)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9.]+", name.lower()))
