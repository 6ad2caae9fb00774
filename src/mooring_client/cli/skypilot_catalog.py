"""SkyPilot's catalog of the instance types of a server, as CSV files that it reads without the network."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import PurePosixPath
from typing import Any, Final

from mooring_client.schemas.skypilot import (
    CPU_ONLY,
    DEFAULT_REGION,
    DEFAULT_ZONE,
    PROVIDER,
    accelerator,
    gpu_type,
    memory_gb,
)

FOLDER: Final = PurePosixPath(".sky/catalogs/v8")
TYPES: Final = FOLDER / "primeintellect" / "vms.csv"
# These two are of all clouds. SkyPilot downloads them if they are missing.
ACCELERATORS: Final = FOLDER / "common" / "accelerators.csv"
METADATA: Final = FOLDER / "common" / "metadata.csv"

_CLOUD: Final = "PrimeIntellect"
_COLUMNS: Final = (
    "InstanceType", "UpstreamCloudId", "vCPUs", "MemoryGiB", "AcceleratorName", "AcceleratorCount", "GpuInfo",
    "Region", "AvailabilityZone", "Price", "SpotPrice",
)  # fmt: skip
_MIB_PER_GIB: Final = 1024
# A node keeps some memory for itself.
_USABLE: Final = 0.95
# vCPUs of pods without GPUs, with 4 GiB for each. SkyPilot's own programs need two and some GiB.
_CPU_SIZES: Final = (2, 4, 8, 16, 32, 64, 128)
_GIB_PER_CPU: Final = 4
# Of what has no price. SkyPilot takes the cheapest type that fits, so a larger one must not cost the same.
_NOMINAL_GPU: Final = 0.001
_NOMINAL_CPU: Final = 0.00001
# Of a region or zone. Labels may have other characters, which SkyPilot's templates would have to quote.
_PLACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Row = tuple[object, ...]


def catalog(
    types: Sequence[Mapping[str, Any]], nodes: Iterable[Mapping[str, Any]]
) -> dict[PurePosixPath, str]:
    """The text of each file, by its path below the home folder.

    Args:
        types: as from `GET /v1/instance-types`.
        nodes: as from `GET /v1/nodes`.
    """
    whole = [each for each in types if each["mig_profile"] is None]
    rows = {row[0:1] + row[7:9]: row for node in nodes for row in _of_node(node, whole)}
    names = {
        accelerator(each["gpu_model"], each["gpu_memory_mib"]): memory_gb(each["gpu_memory_mib"])
        for each in whole
    }
    return {
        TYPES: _csv(_COLUMNS, sorted(rows.values(), key=lambda row: (row[9], row[0], *row[7:9]))),
        ACCELERATORS: _csv(("AcceleratorName", "Clouds"), [(name, _CLOUD) for name in sorted(names)]),
        METADATA: _csv(
            ("GPU", "MemoryGB", "Manufacturer"), [(name, names[name], "NVIDIA") for name in sorted(names)]
        ),
    }


def _of_node(node: Mapping[str, Any], types: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """The types that fit the node when it is empty, each with its share of the CPUs and memory."""
    cpus, memory_gib = node["cpus"] or 0, int((node["memory_mib"] or 0) * _USABLE) // _MIB_PER_GIB
    place = _place(node, "region", DEFAULT_REGION), _place(node, "zone", DEFAULT_ZONE)
    gpus = [
        (gpu["model"], gpu["memory_mib"])
        for gpu in node["gpus"]
        if gpu["health"] == "healthy" and gpu["mig_mode"] != "enabled"
    ]
    for each in types:
        model, memory_mib, count = each["gpu_model"], each["gpu_memory_mib"], each["gpu_count"]
        if count <= gpus.count((model, memory_mib)):
            share = count / len(node["gpus"])
            yield _gpu_row(each, max(1, int(cpus * share)), max(1, int(memory_gib * share)), place)
    fitting = [(size, size * _GIB_PER_CPU) for size in _CPU_SIZES if size <= cpus]
    for size in [size for size in fitting if size[1] <= memory_gib] or [(cpus, memory_gib)]:
        if min(size) > 0:
            yield _cpu_row(*size, place)


def _place(node: Mapping[str, Any], label: str, usual: str) -> str:
    found = str(node["labels"].get(label, usual))
    return found if _PLACE.fullmatch(found) else usual


def _gpu_row(each: Mapping[str, Any], cpus: int, memory_gib: int, place: tuple[str, str]) -> Row:
    model, memory_mib, count = each["gpu_model"], each["gpu_memory_mib"], each["gpu_count"]
    name = accelerator(model, memory_mib)
    device = {"Name": name, "Count": count, "MemoryInfo": {"SizeInMiB": memory_mib}}
    info = {"Gpus": [device], "TotalGpuMemoryInMiB": memory_mib * count}
    micros = each["price_micros_per_hour"]
    price = _NOMINAL_GPU * count if micros is None else micros / 1e6
    instance_type = f"{PROVIDER}__{count}x{gpu_type(model, memory_mib)}__{cpus}__{memory_gib}"
    return (
        instance_type, each["name"], float(cpus), float(memory_gib), name, float(count), json.dumps(info),
        *place, round(price, 6), "",
    )  # fmt: skip


def _cpu_row(cpus: int, memory_gib: int, place: tuple[str, str]) -> Row:
    instance_type = f"{PROVIDER}__{CPU_ONLY}__{cpus}__{memory_gib}"
    price = round(_NOMINAL_CPU * cpus, 6)
    return instance_type, CPU_ONLY, float(cpus), float(memory_gib), "", "", "", *place, price, ""


def _csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
