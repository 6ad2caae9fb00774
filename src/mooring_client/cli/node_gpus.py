"""The commands of `mooring nodes` on GPUs: gpus, clear, incidents."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mooring_client.cli.completion import names_of
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, size
from mooring_client.cli.resources import NODE, every, find_node, for_each
from mooring_client.cli.session import connect
from mooring_client.errors import NotFound

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

GpuArgument = Annotated[str, typer.Argument(help="UUID, or NODE:INDEX such as gpu-1:3", metavar="GPU")]


def _gpu_problem(gpu: Any) -> str:
    if gpu["reason"]:
        return str(gpu["reason"]["message"])
    return ", ".join(condition["code"] for condition in gpu["conditions"]) or "-"


def _instances(gpu: Any) -> str:
    return ", ".join(holder["instance_id"] for holder in gpu["holders"]) or "-"


COLUMNS = (
    Column("GPU", lambda row: f"{row['node_name']}:{row['index']}"),
    Column("UUID", lambda row: row["uuid"]),
    Column("MODEL", lambda row: row["model"]),
    Column("MEMORY", lambda row: size(row["memory_mib"]), wide=True),
    Column("PCI", lambda row: row["pci_bus_id"] or "-", wide=True),
    Column("HEALTH", lambda row: row["health"]),
    Column("FREE", lambda row: f"{row['share_free']:g}"),
    Column("INSTANCES", _instances),
    Column("PROBLEM", _gpu_problem),
)


def gpus(
    node: Annotated[
        str | None,
        typer.Argument(help="name or ID", metavar="NODE", autocompletion=names_of(NODE.path)),
    ] = None,
    health: Annotated[
        Literal["healthy", "quarantined", "lost"] | None, typer.Option(help="only those")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the GPUs of all nodes, or of one, with their health and instances.

    The JSON is a list of the objects of GET /v1/gpus.
    """
    with connect() as client:
        node_id = None if node is None else find_node(client, node)["id"]
        found = every(client, "/v1/gpus", node_id=node_id, health=health)
        items = sorted(found, key=lambda gpu: (gpu["node_name"], gpu["index"]))
        show_list(items, COLUMNS, output, empty="no such GPUs")


def clear(
    gpus: Annotated[list[str], typer.Argument(help="UUIDs, or NODE:INDEX such as gpu-1:3", metavar="GPU")],
) -> None:
    """Return quarantined GPUs to service."""
    with connect() as client:
        for_each(gpus, lambda gpu: _clear(client, gpu))


def _clear(client: "Mooring", gpu: str) -> str:
    from mooring_client.calls import path

    return str(client.request("POST", path("/v1/gpus/{}/clear", _gpu_uuid(client, gpu)))["uuid"])


def _gpu_uuid(client: "Mooring", reference: str) -> str:
    """The UUID of a GPU. Raises NotFound: the node has no such GPU."""
    node, colon, index = reference.rpartition(":")
    if not colon:
        if not reference.strip("."):  # no path can have such a part
            raise NotFound(f"there is no GPU {reference!r}; `mooring nodes gpus` lists all")
        return reference
    for gpu in find_node(client, node)["gpus"]:
        if str(gpu["index"]) == index:
            return str(gpu["uuid"])
    raise NotFound(f"the node {node} has no GPU {index!r}; `mooring nodes gpus {node}` lists all")


INCIDENT_COLUMNS = (
    Column("SINCE", lambda row: row["since"]),
    Column("LAST", lambda row: age(row["last_at"])),
    Column("COUNT", lambda row: str(row["count"])),
    Column("SEVERITY", lambda row: row["severity"]),
    Column("CODE", lambda row: row["code"]),
    Column("ACTION", lambda row: row["action"]),
    Column("INSTANCE", lambda row: row["instance_id"] or "-", wide=True),
    Column("MESSAGE", lambda row: row["message"]),
)


def incidents(gpu: GpuArgument, output: FormatOption = Format.TABLE) -> None:
    """List the faults of a GPU, newest first.

    The JSON is a list of the objects of GET /v1/gpus/{uuid}/incidents.
    """
    from mooring_client.calls import path

    with connect() as client:
        items = every(client, path("/v1/gpus/{}/incidents", _gpu_uuid(client, gpu)))
        show_list(items, INCIDENT_COLUMNS, output, empty="no incidents")
