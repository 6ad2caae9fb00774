"""`mooring nodes`: GPU servers, and how they join, are drained, and leave."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli import node_gpus, values
from mooring_client.cli.completion import NodeArgument, names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, age, duration, show_list, show_one, size
from mooring_client.cli.resources import NODE, every, find_node, find_project, for_each, project_names
from mooring_client.cli.session import ENDED, connect, say
from mooring_client.errors import Forbidden, NodeInUse

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="List and manage nodes."
)
for _command in (node_gpus.gpus, node_gpus.clear, node_gpus.incidents):
    app.command()(_command)

NodesArgument = Annotated[
    list[str], typer.Argument(help="names or IDs", metavar="NODE", autocompletion=names_of(NODE.path))
]


def _gpus_free(node: Any) -> str:
    gpus = node["gpus"]
    free = sum(gpu["health"] == "healthy" and gpu["share_free"] == 1 for gpu in gpus)
    bad = Counter(gpu["health"] for gpu in gpus if gpu["health"] != "healthy")
    return ", ".join([f"{free} of {len(gpus)}", *(f"{number} {health}" for health, number in bad.items())])


def _models(node: Any) -> str:
    return ", ".join(sorted({gpu["model"] for gpu in node["gpus"]})) or "-"


def _cpus_free(node: Any) -> str:
    return "-" if node["cpus"] is None else f"{node['cpus_free']:g} of {node['cpus']}"


def _memory_free(node: Any) -> str:
    return (
        "-"
        if node["memory_mib"] is None
        else f"{size(node['memory_mib_free'])} of {size(node['memory_mib'])}"
    )


def _disk_free(node: Any) -> str:
    if node["disk_mib"] is None:
        return "-"
    return f"{size(node['disk_mib_free'])} of {size(node['disk_allocatable_mib'])}"


def _reason(resource: Any) -> str:
    return str(resource["reason"]["message"]) if resource["reason"] else "-"


NODE_COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("ID", lambda row: row["id"], wide=True),
    Column("STATE", lambda row: row["state"]),
    Column("GPUS FREE", _gpus_free),
    Column("MODEL", _models),
    Column("CPUS FREE", _cpus_free),
    Column("MEMORY FREE", _memory_free),
    Column("DISK FREE", _disk_free, wide=True),
    Column("AGENT", lambda row: row["versions"]["agent"] or "-", wide=True),
    Column("DRIVER", lambda row: row["versions"]["driver"] or "-", wide=True),
    Column("REPORTED", lambda row: age(row["last_heartbeat_at"])),
    Column("REASON", _reason),
)


@app.command("ls")
def list_nodes(output: FormatOption = Format.TABLE) -> None:
    """List nodes.

    The JSON is a list of the objects of GET /v1/nodes.
    """
    with connect() as client:
        items = every(client, NODE.path)
        show_list(items, NODE_COLUMNS, output, empty="no nodes; `mooring nodes join` adds one")


@app.command()
def show(node: NodeArgument, output: FormatOption = Format.TABLE) -> None:
    """Show a node and its GPUs.

    The JSON is the object of GET /v1/nodes/{id}.
    """
    with connect() as client:
        found = find_node(client, node)
        tables = output in {Format.TABLE, Format.WIDE}
        names = project_names(client) if tables and found["reserved_for"] else {}
    show_one(found, output, list(_fields(found, names)))
    if tables and found["gpus"]:
        print()
        show_list(found["gpus"], node_gpus.COLUMNS, output, empty="")


def _fields(node: Any, projects: dict[str, str]) -> Iterator[tuple[str, str]]:
    yield from (
        ("name", node["name"]),
        ("ID", node["id"]),
        ("state", node["state"]),
        ("reason", _reason(node)),
    )
    if node["drain_deadline_at"]:
        yield "stops instances at", node["drain_deadline_at"]
    yield "host", node["hostname"] or "-"
    yield "address", node["address"] or "-"
    yield "labels", ", ".join(f"{key}={value}" for key, value in node["labels"].items()) or "-"
    yield from (("CPUs free", _cpus_free(node)), ("memory free", _memory_free(node)))
    yield "disk free", _disk_free(node)
    yield "versions", ", ".join(f"{name} {found}" for name, found in node["versions"].items() if found) or "-"
    if node["reserved_for"] is not None:
        reserved = ", ".join(projects.get(project, project) for project in node["reserved_for"])
        yield "reserved for", reserved or "projects that you cannot see"
    for override in node["overrides"]:
        yield "check turned off", override
    for orphan in node["orphans"]:
        yield "unknown container", f"{orphan['name']} ({orphan['container_id'][:12]})"
    for line in _differences(node["facts_changed"]):
        yield "not approved", line
    yield "last report", f"{age(node['last_heartbeat_at'])} ago" if node["last_heartbeat_at"] else "never"


def _differences(facts_changed: Any) -> Iterator[str]:
    """What a node reports that is not approved, one fact a line."""
    for change in facts_changed["changes"] if facts_changed else ():
        of = f" of {change['gpu_uuid']}" if change["gpu_uuid"] else ""
        moved = f" (approved for another node, {change['node_id']})" if change["node_id"] else ""
        yield f"{change['fact']}{of}: {change['approved']} -> {change['reported']}{moved}"


@app.command()
def join(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="the node's name; default: its host's")
    ] = None,
    ttl: Annotated[str, typer.Option(help="until the token expires, at most 24h: 30m, 8h")] = "1h",
    server: Annotated[
        str | None, typer.Option(help="URL at which the node reaches the server; default: as you reach it")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a token with which one machine can join, and print the command to run on that machine.

    The JSON is the object of POST /v1/join-tokens.
    """
    from mooring_client.endpoint import checked_url

    lifetime = values.seconds(ttl)
    with connect() as client:
        url = checked_url(server or client.endpoint.url, insecure=True)
        created = client.request(
            "POST", "/v1/join-tokens", body={"ttl_s": lifetime, **({"node_name": name} if name else {})}
        )
    if output in {Format.JSON, Format.YAML}:
        show_one(created, output, [])
        return
    say(
        f"run this on the new machine within {duration(lifetime)}; it works once. "
        "`mooring doctor` there says what the machine lacks"
    )
    print(_join_command(url, created))


def _join_command(url: str, token: Any) -> str:
    import shlex
    from urllib.parse import urlsplit

    variables = {"MOORING_SERVER_URL": url, "MOORING_JOIN_TOKEN": token["token"]}
    if token["node_name"]:
        variables["MOORING_NODE_NAME"] = token["node_name"]
    if urlsplit(url).hostname in {"127.0.0.1", "::1", "localhost"}:
        say(f"{url} reaches the server only on its own machine; for another one, add --server URL")
    elif url.startswith("http:"):
        variables["MOORING_INSECURE_HTTP"] = "true"
    settings = [f"{variable}={shlex.quote(value)}" for variable, value in variables.items()]
    return " ".join([*settings, "mooring agent"])


@app.command()
def approve(node: NodeArgument, yes: YesOption = False) -> None:
    """Accept what a node reports although it differs from the approved facts, such as a new GPU."""
    with connect() as client:
        found = find_node(client, node)
        difference = found["facts_changed"]
        if difference is None:
            _require_admin(client)
            say(f"{found['name']} reports what is approved; there is nothing to do")
            return
        for line in _differences(difference):
            say(line)
        confirm(f"approve this of the node {found['name']}?", yes=yes)
        # If the node reports other facts by now, nothing is approved.
        print(_post(client, found, "approve", {"difference_id": difference["id"]}))


def _require_admin(client: "Mooring") -> None:
    """Only admins see what a node reports, so for others `null` does not mean that all is approved."""
    if not client.request("GET", "/v1/me")["is_admin"]:
        raise Forbidden("this needs admin rights, which your credentials do not have")


def _post(client: "Mooring", node: Any, action: str, body: Any = None) -> str:
    from mooring_client.calls import path

    client.request("POST", path("/v1/nodes/{}/{}", node["id"], action), body=body)
    return str(node["name"])


@app.command()
def cordon(nodes: NodesArgument) -> None:
    """Place nothing new on nodes. What runs there continues."""
    with connect() as client:
        for_each(nodes, lambda node: _post(client, find_node(client, node), "cordon"))


@app.command()
def drain(
    nodes: NodesArgument,
    deadline: Annotated[
        str | None, typer.Option(help="stop what still runs after: 30m, 8h; 0: now; default: never")
    ] = None,
    yes: YesOption = False,
) -> None:
    """Empty nodes: place nothing new, and stop what still runs at a deadline."""
    body = None
    if deadline is not None:
        body = {"deadline_s": 0 if deadline == "0" else values.seconds(deadline)}
    with connect() as client:
        found = [find_node(client, node) for node in nodes]
        if body is not None and not yes:
            number = sum(_live_on(client, node) for node in found)
            when = f"in {duration(body['deadline_s'])}" if body["deadline_s"] else "now"
            confirm(f"stop what runs on {_names(found)} {when}? At present, {number} instances run.", yes=yes)
        for_each(found, lambda node: _post(client, node, "drain", body))


def _live_on(client: "Mooring", node: Any) -> int:
    """The number of instances on a node that have not ended and that you can see."""
    instances = every(client, "/v1/instances", node_id=node["id"])
    return sum(instance["state"] not in ENDED for instance in instances)


def _names(resources: list[Any]) -> str:
    return ", ".join(resource["name"] for resource in resources)


@app.command()
def resume(nodes: NodesArgument) -> None:
    """Place instances on nodes again, after a cordon or a drain."""
    with connect() as client:
        for_each(nodes, lambda node: _post(client, find_node(client, node), "uncordon"))


@app.command()
def reserve(
    node: NodeArgument,
    projects: Annotated[
        list[str] | None,
        typer.Argument(help="names or IDs", metavar="PROJECT", autocompletion=names_of("/v1/projects")),
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="open it to all projects again")] = False,
) -> None:
    """Place only instances of these projects on a node. What others run there continues."""
    from mooring_client.calls import path

    if bool(projects) == everybody:
        raise typer.BadParameter("name projects, or give --all")
    with connect() as client:
        found = find_node(client, node)
        ids = [find_project(client, project)["id"] for project in projects or ()]
        client.request("PATCH", path("/v1/nodes/{}", found["id"]), body={"reserved_for": ids or None})
        print(found["name"])


@app.command()
def renew_credential(nodes: NodesArgument) -> None:
    """Make nodes replace their credentials; the old ones then no longer work."""
    with connect() as client:
        for_each(nodes, lambda node: _post(client, find_node(client, node), "renew-credential"))


@app.command()
def rm(
    nodes: NodesArgument,
    force: Annotated[
        bool, typer.Option("--force", help="declare the machines dead: their instances fail")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Remove nodes. Without --force, a node with instances stays."""
    with connect() as client:
        found = [find_node(client, node) for node in nodes]
        if not yes:
            confirm(_question(client, found, force), yes=yes)
        for_each(found, lambda node: _remove(client, node, force))


def _question(client: "Mooring", nodes: list[Any], force: bool) -> str:
    if not force:
        return f"remove {_names(nodes)}? A removed machine needs a new token to join again."
    number = sum(_live_on(client, node) for node in nodes)
    return f"remove {_names(nodes)} as dead? {number} instances fail, even if they still run."


def _remove(client: "Mooring", node: Any, force: bool) -> str:
    from mooring_client.calls import path

    try:
        client.request("DELETE", path("/v1/nodes/{}", node["id"]), params={"force": force})
    except NodeInUse as failure:
        name, number = node["name"], failure.fields.get("instances")
        in_use = NodeInUse(
            f"{name} has {number} live instances; `mooring nodes drain {name}` first, or, if the machine is "
            "dead, add --force"
        )
        in_use.request_id = failure.request_id
        raise in_use from None
    return str(node["name"])
