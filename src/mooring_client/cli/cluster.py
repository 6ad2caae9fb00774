"""Commands on the cluster: gpus and queue."""

from typing import Annotated, Any

import typer

from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, size
from mooring_client.cli.session import connect


def _price(row: Any) -> str:
    if row["price_micros_per_hour"] is None:
        return "-"
    return f"{row['price_micros_per_hour'] / 1_000_000:g} {row['currency']}/h"


_TYPES = (
    Column("TYPE", lambda row: row["name"]),
    Column("MODEL", lambda row: row["gpu_model"]),
    Column("GPUS", lambda row: str(row["gpu_count"])),
    Column("MEMORY", lambda row: size(row["gpu_memory_mib"])),
    Column("FREE NOW", lambda row: f"{row['available']} of {row['total']}"),
    Column("PRICE", _price),
)


def gpus(output: FormatOption = Format.TABLE) -> None:
    """List what can be requested, and how many of each could start now.

    The JSON is a list of the objects of GET /v1/instance-types.
    """
    with connect() as client:
        items = client.request("GET", "/v1/instance-types")["items"]
    show_list(items, _TYPES, output, empty="no node has a healthy GPU; `mooring nodes ls` shows the nodes")


def _what(row: Any) -> str:
    if row["name"] is None:
        return "(another project)"
    return f"{row['name']} ({row['count']} members)" if row["group_id"] else str(row["name"])


_QUEUE = (
    Column("#", lambda row: str(row["position"])),
    Column("NAME", _what),
    Column("GPUS", lambda row: f"{row['gpus']:g}"),
    Column("PRIORITY", lambda row: str(row["priority"])),
    Column("WAITS", lambda row: age(row["waits_since"])),
    Column("STARTS AT", lambda row: row["starts_at"] or "-"),
    Column("BEHIND THE ONE BEFORE BY", lambda row: row["behind"] or "-", wide=True),
    Column("REASON", lambda row: row["reason"]["message"] if row["reason"] else "-"),
)


def queue(
    most: Annotated[int, typer.Option("--limit", min=1, max=200)] = 50, output: FormatOption = Format.TABLE
) -> None:
    """List pending instances in the order in which they will start.

    The JSON is a list of the `items` of GET /v1/queue.
    """
    with connect() as client:
        answer = client.request("GET", "/v1/queue", params={"limit": most})
    show_list(answer["items"], _QUEUE, output, empty="nothing waits")
