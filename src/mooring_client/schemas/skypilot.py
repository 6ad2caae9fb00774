"""Names that the server and `mooring compat skypilot` share: GPU types, regions and zones of SkyPilot."""

import re
from typing import Final

PROVIDER: Final = "mooring"
CPU_ONLY: Final = "CPU_NODE"  # the gpuType of a pod without GPUs
# The region and zone of nodes without the labels `region` and `zone`; a pod there may get any node.
DEFAULT_REGION: Final = "lab"
DEFAULT_ZONE: Final = "z1"

_VENDORS: Final = frozenset({"nvidia", "tesla", "geforce", "quadro"})
# Words of NVML's names that say how a GPU is built or sold, and no more than its memory says.
_VARIANTS: Final = re.compile(
    r"\d+GB|HBM\w*|SXM\d*|PCIe|NVL|Blackwell|Generation|Server|Workstation|Max|Q|Edition|Laptop|GPU",
    re.IGNORECASE,
)
# SkyPilot has a name of its own for the larger of two sizes of these.
_LARGER_MIB: Final = {"A100": 45_000, "V100": 20_000}


def gpu_name(model: str) -> str:
    """The short name of a GPU model: `H100` for `NVIDIA H100 80GB HBM3`, `RTX4090`, `RTX6000-Ada`."""
    words = [word for word in re.split(r"[^A-Za-z0-9.]+", model) if word]
    kept = [word for word in words if word.lower() not in _VENDORS and not _VARIANTS.fullmatch(word)]
    joined = "".join(f"-{word}" if word == "Ada" else word for word in kept)
    return joined or "-".join(words)


def memory_gb(memory_mib: int) -> int:
    """The memory of a GPU in whole gigabytes, as its type has it."""
    return round(memory_mib / 1024)


def gpu_type(model: str, memory_mib: int) -> str:
    """The gpuType of a pod with such GPUs: `H100_80GB`."""
    return f"{gpu_name(model)}_{memory_gb(memory_mib)}GB"


def accelerator(model: str, memory_mib: int) -> str:
    """The name for `sky launch --gpus`: `H100`, `A100-80GB`."""
    name = gpu_name(model)
    larger = memory_mib > _LARGER_MIB.get(name, memory_mib)
    return f"{name}-{memory_gb(memory_mib)}GB" if larger else name
