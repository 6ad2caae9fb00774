"""The tables of `mooring top`: as lines, and as the screen of a terminal."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mooring_client.cli.output import Column, age, duration, gpus_of, size, table
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, Group
    from rich.table import Table

    from mooring_client.cli.top import Seen

# The header, the failure, and for each table its titles and what does not fit.
_OTHER_LINES: Final = 6
_UTILIZATION: Final = "utilization_gpu_pct"
_NO_GPUS: Final = "no GPUs"
_NO_INSTANCES: Final = "no instance runs"


def _sampled(gpu: Any, field: str) -> float | None:
    found: float | None = (gpu["sample"] or {}).get(field)
    return found


def _rounded(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _memory(gpu: Any) -> str:
    used = _sampled(gpu, "memory_used_mib")
    return f"{'-' if used is None else f'{used / 1024:.1f}'} of {size(gpu['memory_mib'])}"


GPU_COLUMNS: Final = (
    Column("NODE", lambda gpu: gpu["node_name"]),
    Column("GPU", lambda gpu: str(gpu["index"])),
    Column("MODEL", lambda gpu: gpu["model"].removeprefix("NVIDIA ")),
    Column("UTIL", lambda gpu: _rounded(_sampled(gpu, _UTILIZATION), "%")),
    Column("MEMORY", _memory),
    Column("POWER", lambda gpu: _rounded(_sampled(gpu, "power_w"), " W")),
    Column("TEMP", lambda gpu: _rounded(_sampled(gpu, "temperature_c"), " C")),
    Column("USED BY", lambda gpu: gpu["used_by"]),
)
INSTANCE_COLUMNS: Final = (
    Column("INSTANCE", lambda row: row["name"]),
    Column("NODE", lambda row: row["node_name"] or "-"),
    Column("GPUS", gpus_of),
    Column("UTIL", lambda row: _rounded(row["utilization"], "%")),
    Column("RUNS", lambda row: age(row["started_at"])),
    Column("IMAGE", lambda row: row["image"]),
)
_SHORT: Final = frozenset({"GPU", "UTIL", "MEMORY", "POWER", "TEMP", "GPUS", "RUNS"})
_ONLY_IF_WIDE: Final = frozenset({"MODEL", "POWER", "TEMP", "IMAGE"})
_WIDE: Final = 72  # characters


def lines(seen: "Seen") -> list[str]:
    """Both tables as text."""
    gpus, instances = _cells(GPU_COLUMNS, _gpu_rows(seen)), _cells(INSTANCE_COLUMNS, _instance_rows(seen))
    return [
        *(table([column.title for column in GPU_COLUMNS], gpus) if gpus else [_NO_GPUS]),
        "",
        *(table([column.title for column in INSTANCE_COLUMNS], instances) if instances else [_NO_INSTANCES]),
    ]


def view(seen: "Seen", screen: "ConsoleDimensions", now: float) -> "Group":
    """Both tables for a terminal, with as many rows as fit.

    Args:
        now: in seconds since 1970.
    """
    from rich.console import Group
    from rich.text import Text

    gpus, instances = _gpu_rows(seen), _instance_rows(seen)
    gpu_rows, instance_rows = _fitting(screen.height - _OTHER_LINES, len(gpus), len(instances))
    return Group(
        Text(_header(seen, gpus), style="bold", no_wrap=True, overflow="ellipsis"),
        Text(_failure(seen, now), style="bold red", no_wrap=True, overflow="ellipsis"),
        _table(GPU_COLUMNS, gpus[:gpu_rows], screen.width) if gpus else Text(_NO_GPUS),
        Text(_more(len(gpus) - gpu_rows, "GPUs"), style="dim"),
        _table(INSTANCE_COLUMNS, instances[:instance_rows], screen.width)
        if instances
        else Text(_NO_INSTANCES),
        Text(_more(len(instances) - instance_rows, "instances"), style="dim", end=""),
    )


def _fitting(height: int, gpus: int, instances: int) -> tuple[int, int]:
    """The number of rows of each table. Instances have a third, or what GPUs leave."""
    instance_rows = min(instances, max(height // 3, height - gpus, 1))
    return min(gpus, max(height - instance_rows, 1)), instance_rows


def _header(seen: "Seen", gpus: Sequence[Any]) -> str:
    used = sum(gpu["share_free"] < 1 for gpu in gpus)
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    return (
        f"{clock}   GPUs in use: {used} of {len(gpus)}   instances running: {len(seen.instances)}   q: quit"
    )


def _failure(seen: "Seen", now: float) -> str:
    if not seen.failure:
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(seen.failing_since))
    return clean_line(
        f"no news since {since} ({duration(now - seen.failing_since)}): {seen.failure}; trying again"
    )


def _more(number: int, what: str) -> str:
    return f"... {number} more {what}" if number > 0 else ""


def _table(every_column: Sequence[Column], rows: Sequence[Any], width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    columns = [each for each in every_column if width >= _WIDE or each.title not in _ONLY_IF_WIDE]
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        # In a narrow terminal, names become shorter and numbers do not.
        found.add_column(column.title, no_wrap=column.title in _SHORT)
    for row, texts in zip(rows, _cells(columns, rows), strict=True):
        style = "red" if row.get("health", "healthy") != "healthy" else ""
        found.add_row(*(Text(text, style=style, no_wrap=True, overflow="ellipsis") for text in texts))
    return found


def _cells(columns: Sequence[Column], rows: Sequence[Any]) -> list[list[str]]:
    return [[clean_line(column.of(row)) for column in columns] for row in rows]


def _gpu_rows(seen: "Seen") -> list[dict[str, Any]]:
    names = {instance["id"]: instance["name"] for instance in seen.instances}
    return [{**gpu, "used_by": _used_by(gpu, names)} for gpu in seen.gpus]


def _used_by(gpu: Any, names: dict[str, str]) -> str:
    users = list(
        dict.fromkeys(names.get(each["instance_id"], each["instance_id"]) for each in gpu["holders"])
    )
    held = 1 - gpu["share_free"] - sum(each["share"] for each in gpu["holders"])
    if held > 0.0005:  # shares are thousandths
        users.append("(another project)")
    if gpu["health"] != "healthy":
        users.append(gpu["health"])
    return ", ".join(users) or "-"


def _instance_rows(seen: "Seen") -> list[dict[str, Any]]:
    utilization = {gpu["uuid"]: _sampled(gpu, _UTILIZATION) for gpu in seen.gpus}
    return [{**each, "utilization": _mean_of(each, utilization)} for each in seen.instances]


def _mean_of(instance: Any, utilization: dict[str, float | None]) -> float | None:
    """The mean utilization of an instance's GPUs; None if one of them is unknown."""
    found = [utilization.get(device["uuid"]) for device in instance["devices"]]
    known = [each for each in found if each is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None
