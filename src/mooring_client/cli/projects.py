"""`mooring projects`: projects and their limits. Members and quotas are in modules of their own."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mooring_client.cli import project_members, project_quotas, values
from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, show_one, table
from mooring_client.cli.project_quotas import given, limit, number
from mooring_client.cli.resources import PROJECT, ProjectArgument, every, find_project, for_each
from mooring_client.cli.session import connect, project_id

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="List and manage projects."
)
app.add_typer(project_members.app, name="members")
app.add_typer(project_quotas.app, name="quota")


def _pairs(pairs: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in pairs.items()) or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("ID", lambda row: row["id"], wide=True),
    Column("GPU QUOTA", lambda row: _number(row["quotas"]["gpus"])),
    Column("GUARANTEED", lambda row: _number(row["guaranteed_gpus"])),
    Column("WEIGHT", lambda row: _number(row["weight"])),
    Column("HOURS A MONTH", lambda row: _number(row["quotas"]["gpu_hours_per_month"]), wide=True),
    Column("LABELS", lambda row: _pairs(row["labels"]), wide=True),
    Column("AGE", lambda row: age(row["created_at"])),
)


@app.command("ls")
def list_projects(output: FormatOption = Format.TABLE) -> None:
    """List the projects that you can see.

    The JSON is a list of the objects of GET /v1/projects.
    """
    with connect() as client:
        items = every(client, PROJECT.path)
        show_list(items, COLUMNS, output, empty="you are in no project; an admin or an owner can add you")


@app.command()
def show(
    project: Annotated[
        str | None,
        typer.Argument(
            help="name or ID; default: your own", metavar="PROJECT", autocompletion=names_of(PROJECT.path)
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a project, its quotas and what it uses of them.

    The JSON is the object of GET /v1/projects/{id}.
    """
    from mooring_client.calls import path

    with connect() as client:
        found = _own(client) if project is None else find_project(client, project)["id"]
        item = client.request("GET", path("/v1/projects/{}", found))
    show_one(item, output, list(_fields(item)))
    if output in {Format.TABLE, Format.WIDE}:
        print()
        print("\n".join(table(["QUOTA", "USED", "LIMIT"], list(project_quotas.rows(item)))))


def _own(client: "Mooring") -> str:
    """The ID of the project that you work in."""
    if chosen := project_id(client):
        return chosen
    me = client.request("GET", "/v1/me")
    if me["project"]:
        return str(me["project"]["id"])
    if len(me["projects"]) == 1:
        return str(me["projects"][0]["id"])
    raise typer.BadParameter("name a project; `mooring projects ls` lists them", param_hint="PROJECT")


def _fields(project: Any) -> Iterator[tuple[str, str]]:
    yield from (("name", project["name"]), ("ID", project["id"]), ("labels", _pairs(project["labels"])))
    yield "guaranteed GPUs", _number(project["guaranteed_gpus"])
    yield "weight", _number(project["weight"])
    yield "maximum priority", _number(project["max_priority"])
    images = project["allowed_images"]
    yield "allowed images", "all" if images is None else ", ".join(images) or "none"
    yield "security profile", project["security_profile"]
    yield "node selector", _pairs(project["node_selector"])
    yield "it may", ", ".join(name for field, name in _ALLOWED.items() if project[field]) or "-"
    if project["require_disk_limits"]:
        yield "nodes", "only those that enforce disk limits"
    yield "created", f"{age(project['created_at'])} ago"


_ALLOWED = {
    "gpu_sharing": "share GPUs",
    "host_network": "use the nodes' network",
    "local_images": "run images that exist only on a node",
    "public_ports": "have public ports",
}


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="key=value")] = None,
    output: FormatOption = Format.NAME,
) -> None:
    """Create a project. It has no members and no limits.

    The JSON is the object of POST /v1/projects.
    """
    labels = values.pairs(label or (), "--label")
    with connect() as client:
        created = client.request("POST", PROJECT.path, body={"name": name, "labels": labels})
    show_one(created, output, list(_fields(created)))


@app.command("set")
def set_limits(
    project: ProjectArgument,
    name: Annotated[str | None, typer.Option(help="its new name")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="key=value: all its labels; none: no labels")
    ] = None,
    guaranteed_gpus: Annotated[
        str | None, typer.Option(help="number that it can reclaim from others, or none")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="in fair sharing; 1 is usual")] = None,
    max_priority: Annotated[str | None, typer.Option(help="0 to 100, or none")] = None,
    allow_image: Annotated[
        list[str] | None, typer.Option(help="a pattern: all that are allowed; '*': all images")
    ] = None,
    security_profile: Annotated[Literal["standard", "strict"] | None, typer.Option()] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(help="key=value that its nodes must have; none: all nodes")
    ] = None,
    gpu_sharing: Annotated[bool | None, typer.Option(help="several of its instances on a GPU")] = None,
    host_network: Annotated[bool | None, typer.Option(help="groups on the nodes' own network")] = None,
    local_images: Annotated[bool | None, typer.Option(help="images that exist only on a node")] = None,
    require_disk_limits: Annotated[bool | None, typer.Option(help="nodes that enforce them")] = None,
    public_ports: Annotated[bool | None, typer.Option(help="ports without a login")] = None,
) -> None:
    """Change a project: owners its name and labels, admins also its limits."""
    from mooring_client.calls import changes, path

    wanted = changes(
        name=given(name),
        labels=_all_pairs(label, "--label"),
        guaranteed_gpus=limit(guaranteed_gpus, int, "--guaranteed-gpus"),
        weight=given(weight),
        max_priority=limit(max_priority, int, "--max-priority"),
        allowed_images=given(allow_image or None),
        security_profile=given(security_profile),
        node_selector=_all_pairs(node_selector, "--node-selector"),
        gpu_sharing=given(gpu_sharing),
        host_network=given(host_network),
        local_images=given(local_images),
        require_disk_limits=given(require_disk_limits),
        public_ports=given(public_ports),
    )
    if not wanted:
        raise typer.BadParameter("give at least one option; --help lists them")
    with connect() as client:
        found = find_project(client, project)
        print(client.request("PATCH", path("/v1/projects/{}", found["id"]), body=wanted)["name"])


def _all_pairs(texts: list[str] | None, option: str) -> Any:
    """All pairs of an option; `none` is no pair, an option that is not given is UNSET."""
    return given(({} if texts == ["none"] else values.pairs(texts, option)) if texts else None)


@app.command()
def rm(
    projects: Annotated[
        list[str],
        typer.Argument(help="names or IDs", metavar="PROJECT", autocompletion=names_of(PROJECT.path)),
    ],
    yes: YesOption = False,
) -> None:
    """Delete projects without instances, with their keys, secrets and reservations."""
    with connect() as client:
        found = [find_project(client, project) for project in projects]
        names = ", ".join(project["name"] for project in found)
        confirm(f"delete {names} with all members, keys, secrets and reservations?", yes=yes)
        for_each(found, lambda project: _delete(client, project))


def _delete(client: "Mooring", project: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", path("/v1/projects/{}", project["id"]))
    return str(project["name"])
