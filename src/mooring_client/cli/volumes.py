"""`mooring volumes`: files that outlive the instances that mount them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli import values
from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, show_one, size
from mooring_client.cli.resources import VOLUME, every, find, for_each
from mooring_client.cli.session import connect, project_id

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Manage the volumes of your project.",
)

VolumeArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="VOLUME", autocompletion=names_of(VOLUME.path))
]


def _users(row: Any) -> str:
    return ", ".join(dict.fromkeys(user["instance_name"] for user in row["mounted_by"])) or "-"


def _limit(row: Any) -> str:
    if row["size_mib"] is None:
        return "-"
    return size(row["size_mib"]) + ("" if row["size_enforced"] else " (not enforced)")


_COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("ID", lambda row: row["id"], wide=True),
    Column("DRIVER", lambda row: row["driver"]),
    Column("SIZE", _limit),
    Column("USED", lambda row: "-" if row["used_mib"] is None else size(row["used_mib"])),
    Column("NODE", lambda row: row["node_name"] or "-"),
    Column("STATE", lambda row: row["state"]),
    Column("MOUNTED BY", _users),
    Column("AGE", lambda row: age(row["created_at"]), wide=True),
)


@app.command("ls")
def list_volumes(output: FormatOption = Format.TABLE) -> None:
    """List volumes.

    The JSON is a list of the objects of GET /v1/volumes.
    """
    with connect() as client:
        items = list(every(client, VOLUME.path, project_id=project_id(client)))
    show_list(items, _COLUMNS, output, empty="no volumes; `mooring volumes create NAME` creates one")


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    driver: Annotated[
        str, typer.Option("--driver", "-d", help="local, cache, or, for admins, nfs")
    ] = "local",
    limit: Annotated[str | None, typer.Option("--size", "-s", help="such as 50g; default: 10g")] = None,
    server: Annotated[str | None, typer.Option(help="of nfs: the server, as nodes reach it")] = None,
    path: Annotated[str | None, typer.Option(help="of nfs: the exported folder")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="key=value")] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(help="of local: key=value that its node must have")
    ] = None,
) -> None:
    """Create a volume, and print its name.

    Its node creates it when the first instance that mounts it starts there: mooring run -v NAME:/data …
    """
    fields = {
        "name": name,
        "driver": driver,
        "size_mib": limit and values.mib(limit),
        "options": {key: value for key, value in (("server", server), ("path", path)) if value} or None,
        "labels": values.pairs(label or (), "--label") or None,
        "node_selector": values.pairs(node_selector or (), "--node-selector") or None,
    }
    with connect() as client:
        fields["project_id"] = project_id(client)
        given = {field: value for field, value in fields.items() if value is not None}
        print(client.request("POST", VOLUME.path, body=given)["name"])


@app.command()
def show(volume: VolumeArgument, output: FormatOption = Format.TABLE) -> None:
    """Show a volume: where it is, how full it is, and which instances mount it.

    The JSON is the object of GET /v1/volumes/{id}.
    """
    with connect() as client:
        found = _find(client, volume)
    show_one(found, output, [(column.title.lower(), column.of(found)) for column in _COLUMNS])


@app.command()
def rm(
    volumes: Annotated[
        list[str],
        typer.Argument(help="names or IDs", metavar="VOLUME", autocompletion=names_of(VOLUME.path)),
    ],
    yes: YesOption = False,
) -> None:
    """Delete volumes with all their files. One that an instance mounts is kept, also if that is stopped."""
    with connect() as client:
        found = [_find(client, volume) for volume in volumes]
        names = ", ".join(volume["name"] for volume in found)
        confirm(f"delete {names}, with all files? They cannot be restored.", yes=yes)
        for_each(found, lambda volume: _delete(client, volume))


def _find(client: "Mooring", reference: str) -> Any:
    return find(client, VOLUME, reference, project_id=project_id(client))


def _delete(client: "Mooring", volume: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", path("/v1/volumes/{}", volume["id"]))
    return str(volume["name"])
