"""Fleets of simulated nodes: `2x8xH100` is two nodes with eight H100 each; commas separate fleets.

`1x2xA100:mig=3g.40gb+2g.20gb` divides each GPU into MIG devices; `1x2xA100:mps` simulates the MPS daemon,
which enforces the limits of shares.
"""

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

MAX_NODES = 1000
MAX_GPUS_PER_NODE = 16

_PROFILE = re.compile(r"([1-7])g\.([0-9]{1,3})gb(\+[a-z.]+)?")
_MIG_SLICES = 7
_MIG_RESERVED_MIB = 512  # approximate, per device


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What NVML reports of a GPU: its full name, `memory_mib` as in `nvidia-smi`, and its NVLink topology.

    `nvlink` counts a GPU's links to each other GPU through an NVSwitch; a `cube_mesh` (V100) has no switch.
    """

    name: str
    memory_mib: int
    power_limit_w: int
    idle_power_w: int
    compute_capability: str
    sm_clock_mhz: int
    memory_clock_mhz: int
    nvlink: int = 0
    cube_mesh: bool = False
    has_fan: bool = False


MODELS = MappingProxyType(
    {
        "B200": GpuModel("NVIDIA B200", 183_359, 1000, 145, "10.0", 1965, 3996, nvlink=18),
        "H200": GpuModel("NVIDIA H200", 143_771, 700, 76, "9.0", 1980, 3201, nvlink=18),
        "H100": GpuModel("NVIDIA H100 80GB HBM3", 81_559, 700, 70, "9.0", 1980, 2619, nvlink=18),
        "A100": GpuModel("NVIDIA A100-SXM4-80GB", 81_920, 400, 62, "8.0", 1410, 1593, nvlink=12),
        "V100": GpuModel("Tesla V100-SXM2-32GB", 32_768, 300, 42, "7.0", 1530, 877, cube_mesh=True),
        "L40S": GpuModel("NVIDIA L40S", 46_068, 350, 36, "8.9", 2520, 9001),
        "L4": GpuModel("NVIDIA L4", 23_034, 72, 16, "8.9", 2040, 6251),
        "A10": GpuModel("NVIDIA A10", 23_028, 150, 20, "8.6", 1695, 6251),
        "T4": GpuModel("Tesla T4", 15_360, 70, 10, "7.5", 1590, 5001),
        "RTX 4090": GpuModel("NVIDIA GeForce RTX 4090", 24_564, 450, 22, "8.9", 3105, 10_501, has_fan=True),
    }
)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """`nodes` nodes with `gpus` GPUs of `model` (a key of MODELS); each GPU has the MIG devices `mig`."""

    nodes: int
    gpus: int
    model: str
    mig: tuple[str, ...] = ()
    mps: bool = False


def parse_fleet(text: str) -> SimulatedFleet:
    """Parse one fleet, `2x8xH100:mps`; raise ValueError with the reason if the text is invalid."""
    gpu_part, colon, option = text.partition(":")
    parts = re.fullmatch(r"\s*(\d{1,6})\s*x\s*(\d{1,6})\s*x\s*(\S.*?)\s*", gpu_part, re.IGNORECASE)
    if parts is None:
        raise ValueError(f"{text!r} is not NODESxGPUSxMODEL, like 2x8xH100")
    nodes, gpus = int(parts[1]), int(parts[2])
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"{text!r}: {nodes} nodes, but 1 to {MAX_NODES} can be simulated")
    if not 0 <= gpus <= MAX_GPUS_PER_NODE:
        raise ValueError(f"{text!r}: {gpus} GPUs per node, but 0 to {MAX_GPUS_PER_NODE} can be simulated")
    fleet = SimulatedFleet(nodes, gpus, model_key(parts[3]))
    return _with_option(fleet, option.strip().lower(), text) if colon else fleet


def _with_option(fleet: SimulatedFleet, option: str, text: str) -> SimulatedFleet:
    if option == "mps":
        return replace(fleet, mps=True)
    if not option.startswith("mig="):
        raise ValueError(
            f"{text!r}: {option!r} is neither mps nor mig=PROFILE+PROFILE, like mig=3g.40gb+1g.10gb"
        )
    # A profile can itself contain a plus: 1g.10gb+me.
    profiles = re.split(r"\+(?=\d)", option.removeprefix("mig="))
    matches = [_PROFILE.fullmatch(profile) for profile in profiles]
    if not all(matches):
        raise ValueError(f"{text!r}: MIG profiles are like 3g.40gb+2g.20gb+1g.10gb")
    model = MODELS[fleet.model]
    if not supports_mig(model):
        raise ValueError(f"{text!r}: {fleet.model} has no MIG devices")
    slices = sum(int(match[1]) for match in matches if match)
    memory_mib = sum(map(mig_memory_mib, profiles))
    if slices > _MIG_SLICES or memory_mib > model.memory_mib:
        raise ValueError(f"{text!r}: that is more than a GPU has ({_MIG_SLICES}g, {model.memory_mib} MiB)")
    return replace(fleet, mig=tuple(profiles))


def supports_mig(model: GpuModel) -> bool:
    return model.compute_capability in {"8.0", "9.0", "10.0"}


def mig_memory_mib(profile: str) -> int:
    """Memory of a device of this profile: a little less than its name says."""
    found = re.search(r"\.(\d+)gb", profile)
    if found is None:
        raise ValueError(f"{profile!r} is not a MIG profile")
    return int(found[1]) * 1024 - _MIG_RESERVED_MIB


def parse_fleets(text: str) -> tuple[SimulatedFleet, ...]:
    """Parse a list of fleets, `2x8xH100,1x4xA100`; blank text means none."""
    if not text.strip():
        return ()
    fleets = tuple(parse_fleet(part) for part in text.split(","))
    if sum(fleet.nodes for fleet in fleets) > MAX_NODES:
        raise ValueError(f"{text!r}: more than {MAX_NODES} nodes")
    return fleets


def model_key(text: str) -> str:
    """The key of MODELS, ignoring case, blanks, `-` and `_` (`rtx4090`)."""
    wanted = _normalized(text)
    for key in MODELS:
        if _normalized(key) == wanted:
            return key
    raise ValueError(f"{text!r} is not a GPU model that can be simulated: {', '.join(MODELS)}")


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
