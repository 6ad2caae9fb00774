"""`mooring keys`: API keys."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mooring_client.cli import values
from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, show_one
from mooring_client.cli.resources import (
    PROJECT,
    every,
    find_project,
    find_user,
    for_each,
    is_id,
    project_names,
)
from mooring_client.cli.session import connect, project_id, say
from mooring_client.errors import NotFound

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Manage API keys.")

_PATH = "/v1/api-keys"
# Keys with one of these belong to no project.
_SERVICE_WIDE = frozenset({"admin", "metrics:read"})
_complete = names_of(_PATH)


def _rights(key: Any) -> str:
    return ", ".join([*([key["role"]] if key["role"] else []), *key["scopes"]])


def _beginning(key: Any) -> str:
    return f"{key['prefix']}…" if key["prefix"] else "-"


@app.command("ls")
def list_keys(output: FormatOption = Format.TABLE) -> None:
    """List API keys, without the keys themselves: your own, and all of the projects that you own.

    The JSON is a list of the objects of GET /v1/api-keys.
    """
    with connect() as client:
        items = list(every(client, _PATH, project_id=project_id(client)))
        names = project_names(client) if items and output in {Format.TABLE, Format.WIDE} else {}
    columns = (
        Column("NAME", lambda row: row["name"]),
        Column("ID", lambda row: row["id"]),
        Column("KEY", _beginning),
        Column("PROJECT", lambda row: names.get(row["project_id"], "-")),
        Column("USER ID", lambda row: row["user_id"] or "-", wide=True),
        Column("RIGHTS", _rights),
        Column("EXPIRES", lambda row: row["expires_at"] or "never"),
        Column("USED", lambda row: age(row["last_used_at"])),
        Column("AGE", lambda row: age(row["created_at"]), wide=True),
    )
    show_list(items, columns, output, empty="no keys; `mooring keys create` creates one")


@app.command()
def create(
    name: Annotated[str | None, typer.Option("--name", "-n", help="default: your login here")] = None,
    role: Annotated[
        Literal["viewer", "member", "owner"] | None,
        typer.Option(help="what it may do in its project; default: member, or only its scopes"),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="limits its role; without a role, all it may do: instances:read, instances:write, "
            "instances:exec, usage:read, metrics:read, admin"
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="after: 12h, 30d; or at: 2027-01-31; default: never")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(help="name or ID; default: your own", autocompletion=names_of(PROJECT.path)),
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="e-mail address or ID of the member whose key it is; default: you")
    ] = None,
    service: Annotated[
        bool, typer.Option("--service", help="a key of no user, for a program; owners only")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create an API key, and print it. It is shown only this once.

    The JSON is the object of POST /v1/api-keys.
    """
    from mooring_client.calls import body

    if user and service:
        raise typer.BadParameter("a key with --service has no user: leave --user out")
    scopes = scope or []
    with connect() as client:
        wanted = body(
            name=name or _login(),
            role=role or (None if scopes else "member"),
            scopes=scopes,
            project_id=_project_id(client, project, scopes),
            user_id=None if service else _user_id(client, user),
            expires_at=expires and _expiry(expires),
        )
        created = client.request("POST", _PATH, body=wanted)
        if output in {Format.JSON, Format.YAML}:
            show_one(created, output, [])
            return
        print(created["key"], flush=True)
        of = find_project(client, created["project_id"])["name"] if created["project_id"] else "all projects"
    until = f"expires at {created['expires_at']}" if created["expires_at"] else "never expires"
    say(f"created the key {created['name']} ({created['id']}): {_rights(created)} in {of}; it {until}")
    say("it is shown only now: keep it where only you can read it")


def _login() -> str:
    """A name that says where the key is used."""
    import getpass
    import socket

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # this user has no name, as in some containers
        return socket.gethostname()


def _project_id(client: "Mooring", project: str | None, scopes: list[str]) -> str | None:
    if project is not None:
        return str(find_project(client, project)["id"])
    return None if _SERVICE_WIDE.intersection(scopes) else project_id(client)


def _user_id(client: "Mooring", user: str | None) -> str | None:
    """The user whose key it is; by default you, or nobody if your own key is of no user."""
    if user is not None:
        return find_user(client, user)
    me = client.request("GET", "/v1/me")
    return str(me["user"]["id"]) if me["user"] else None


def _expiry(text: str) -> str:
    """The time of an expiry that is given as a duration or as a time, by default in the local zone."""
    with suppress(typer.BadParameter, OverflowError):
        return (datetime.now(UTC) + timedelta(seconds=values.seconds(text))).isoformat()
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a duration, such as 30d, nor a time, such as 2027-01-31",
            param_hint="--expires",
        ) from None


@app.command()
def rm(
    keys: Annotated[
        list[str],
        typer.Argument(
            help="names, IDs, or what `ls` shows of them", metavar="KEY", autocompletion=_complete
        ),
    ],
    yes: YesOption = False,
) -> None:
    """Revoke API keys. They stop working at once, and so do the SSH keys that they registered."""
    with connect() as client:
        found = [_find(client, key) for key in keys]
        if not yes:
            own = client.request("GET", "/v1/me")["key"]
            yours = any(own and key["id"] == own["id"] for key in found)
            note = " You use one of them now." if yours else ""
            names = ", ".join(f"{key['name']} ({_beginning(key)})" for key in found)
            confirm(f"revoke {names}?{note}", yes=yes)
        for_each(found, lambda key: _revoke(client, key))


def _find(client: "Mooring", reference: str) -> Any:
    """The key with this ID, name, or beginning as `ls` shows it.

    Raises:
        NotFound: there is none that you can see.
        typer.BadParameter: there are several.
    """
    from mooring_client.calls import path

    if is_id(reference, "key"):
        return client.request("GET", path("/v1/api-keys/{}", reference))
    visible = every(client, _PATH, project_id=project_id(client))
    found = [key for key in visible if reference in {key["name"], key["prefix"], _beginning(key)} - {"", "-"}]
    if not found:
        raise NotFound(f"you can see no key {reference!r}; `mooring keys ls` lists all")
    if len(found) > 1:
        ids = ", ".join(key["id"] for key in found)
        raise typer.BadParameter(f"{len(found)} keys have the name {reference!r}; give an ID: {ids}")
    return found[0]


def _revoke(client: "Mooring", key: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", path("/v1/api-keys/{}", key["id"]))
    return str(key["name"])
