"""`mooring webhooks`: where events are sent, and the deliveries."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, Row, age, show_list, show_one
from mooring_client.cli.resources import WEBHOOK, every, find, for_each, project_names
from mooring_client.cli.session import connect, project_id, say

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Send events to other services.",
)

WebhookArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="WEBHOOK", autocompletion=names_of(WEBHOOK.path))
]


@app.command("ls")
def list_webhooks(output: FormatOption = Format.TABLE) -> None:
    """List the webhooks of the projects that you own."""
    with connect() as client:
        items = list(every(client, WEBHOOK.path, project_id=project_id(client)))
        names = project_names(client) if items and output in {Format.TABLE, Format.WIDE} else {}
    columns = (
        Column("NAME", lambda row: row["name"]),
        Column("ID", lambda row: row["id"], wide=True),
        Column("PROJECT", lambda row: "*" if row["all_projects"] else names.get(row["project_id"], "-")),
        Column("STATE", _state),
        Column("PENDING", lambda row: str(row["pending"])),
        Column("EVENTS", lambda row: ",".join(row["events"])),
        Column("FORMAT", lambda row: row["format"], wide=True),
        Column("URL", lambda row: row["url"]),
    )
    show_list(items, columns, output, empty="no webhooks; `mooring webhooks add URL` creates one")


def _state(row: Row) -> str:
    return "enabled" if row["enabled"] else row["disabled_reason"] or "disabled"


@app.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="https://…, or mailto:ADDRESS of a member")],
    name: Annotated[str | None, typer.Option("--name", "-n", help="default: generated")] = None,
    events: Annotated[
        list[str] | None,
        typer.Option("--event", "-e", help="a type of event, several times; default: notices"),
    ] = None,
    slack: Annotated[bool, typer.Option("--slack", help="for Slack and Mattermost")] = False,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="events of all projects, nodes and GPUs (admins)")
    ] = False,
) -> None:
    """Send events to a URL. Prints the secret that verifies signatures, which is shown only once."""
    body: dict[str, Any] = {"url": url, "format": "slack" if slack else "standard"}
    with connect() as client:
        if name is not None:
            body["name"] = name
        if events:
            body["events"] = events
        if all_projects:
            body["all_projects"] = True
        elif project := project_id(client):
            body["project_id"] = project
        made = client.request("POST", WEBHOOK.path, body=body)
    say(f"created {made['name']}; keep its secret, which is not shown again")
    print(made["secret"])


@app.command()
def show(webhook: WebhookArgument, output: FormatOption = Format.TABLE) -> None:
    """Show a webhook."""
    with connect() as client:
        found = _find(client, webhook)
    fields = (
        ("Name", found["name"]),
        ("ID", found["id"]),
        ("URL", found["url"]),
        ("Events", ", ".join(found["events"])),
        ("Format", found["format"]),
        ("State", _state(found)),
        ("Pending", str(found["pending"])),
        ("Age", age(found["created_at"])),
    )
    show_one(found, output, fields)


@app.command()
def rotate(webhook: WebhookArgument) -> None:
    """Make a new secret, and print it. The former one signs for 24 hours too."""
    with connect() as client:
        made = _post(client, webhook, "rotate-secret")
    say("keep the secret, which is not shown again; the former one is valid for 24 hours")
    print(made["secret"])


@app.command("test")
def test_webhook(webhook: WebhookArgument) -> None:
    """Send a test, and print the ID of its delivery."""
    with connect() as client:
        made = _post(client, webhook, "test")
    say(f"`mooring webhooks deliveries {webhook}` shows what came of it")
    print(made["id"])


@app.command()
def deliveries(
    webhook: WebhookArgument,
    status: Annotated[
        str | None, typer.Option("--status", "-s", help="pending, delivered, failed or dropped")
    ] = None,
    most: Annotated[int, typer.Option("--last", "-l", min=1, max=200, help="how many, newest first")] = 20,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the newest deliveries of a webhook."""
    from mooring_client.calls import path

    with connect() as client:
        where = path("/v1/webhooks/{}/deliveries", _find(client, webhook)["id"])
        params = {"limit": most, **({"status": status} if status else {})}
        items = client.request("GET", where, params=params)["items"]
    columns = (
        Column("ID", lambda row: row["id"]),
        Column("TYPE", lambda row: row["type"]),
        Column("INSTANCE", lambda row: row["instance_id"] or "-", wide=True),
        Column("STATUS", lambda row: row["status"]),
        Column("ATTEMPTS", lambda row: str(row["attempts"])),
        Column("LAST", _last),
        Column("NEXT", lambda row: row["next_attempt_at"] or "-", wide=True),
        Column("AGE", lambda row: age(row["created_at"])),
    )
    show_list(items, columns, output, empty="no deliveries")


def _last(row: Row) -> str:
    """The status of the last answer, or why there was none."""
    return str(row["last_code"] or row["last_error"] or "-")


@app.command()
def replay(
    webhook: WebhookArgument,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="ID of a delivery")],
) -> None:
    """Send a delivery again at once."""
    from mooring_client.calls import path

    with connect() as client:
        where = path("/v1/webhooks/{}/deliveries/{}/replay", _find(client, webhook)["id"], delivery)
        made = client.request("POST", where)
    print(made["id"])


@app.command()
def rm(
    webhooks: Annotated[
        list[str],
        typer.Argument(help="names or IDs", metavar="WEBHOOK", autocompletion=names_of(WEBHOOK.path)),
    ],
    yes: YesOption = False,
) -> None:
    """Delete webhooks, with deliveries that are still pending."""
    with connect() as client:
        found = [_find(client, webhook) for webhook in webhooks]
        names = ", ".join(webhook["name"] for webhook in found)
        confirm(f"delete {names}? Pending deliveries are not sent.", yes=yes)
        for_each(found, lambda webhook: _delete(client, webhook))


def _find(client: "Mooring", reference: str) -> Any:
    return find(client, WEBHOOK, reference, project_id=project_id(client))


def _post(client: "Mooring", reference: str, action: str) -> Any:
    from mooring_client.calls import path

    return client.request("POST", f"{path('/v1/webhooks/{}', _find(client, reference)['id'])}/{action}")


def _delete(client: "Mooring", webhook: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", path("/v1/webhooks/{}", webhook["id"]))
    return str(webhook["name"])
