"""`mooring projects members`: the members of a project."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list, show_one
from mooring_client.cli.resources import ProjectArgument, every, find_project, find_user, for_each
from mooring_client.cli.session import connect
from mooring_client.errors import NotFound

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and manage members of projects.")

UserArgument = Annotated[str, typer.Argument(help="e-mail address or ID", metavar="USER")]

COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("E-MAIL", lambda row: row["email"] or "-"),
    Column("USER ID", lambda row: row["user_id"], wide=True),
    Column("ROLE", lambda row: row["role"]),
    Column("SINCE", lambda row: age(row["created_at"])),
)


def _members_path(project: Any) -> str:
    from mooring_client.calls import path

    return path("/v1/projects/{}/members", project["id"])


@app.command("ls")
def list_members(project: ProjectArgument, output: FormatOption = Format.TABLE) -> None:
    """List the members of a project.

    The JSON is a list of the objects of GET /v1/projects/{id}/members.
    """
    with connect() as client:
        items = every(client, _members_path(find_project(client, project)))
        show_list(items, COLUMNS, output, empty="no members; `mooring projects members add` adds one")


@app.command()
def add(
    project: ProjectArgument,
    user: UserArgument,
    role: Annotated[
        Literal["viewer", "member", "owner"], typer.Option(help="viewer: only looks; owner: adds members")
    ] = "member",
    output: FormatOption = Format.NAME,
) -> None:
    """Add a member to a project, or change their role.

    The JSON is the object of PUT /v1/projects/{id}/members/{user_id}.
    """
    from mooring_client.calls import path

    with connect() as client:
        found = find_project(client, project)
        member = path("/{}", find_user(client, user))
        item = client.request("PUT", f"{_members_path(found)}{member}", body={"role": role})
    fields = [("name", item["name"]), ("e-mail", item["email"] or "-"), ("role", item["role"])]
    show_one(item, output, fields)


@app.command()
def rm(project: ProjectArgument, user: UserArgument, yes: YesOption = False) -> None:
    """Remove a member from a project. Their keys of the project are revoked."""
    with connect() as client:
        found = find_project(client, project)
        member = _find(client, found, user)
        question = f"remove {member['name']} from {found['name']}, and revoke their keys of this project?"
        confirm(question, yes=yes)
        for_each([member], lambda member: _remove(client, found, member))


def _remove(client: "Mooring", project: Any, member: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", f"{_members_path(project)}{path('/{}', member['user_id'])}")
    return str(member["name"])


def _find(client: "Mooring", project: Any, reference: str) -> Any:
    """The member with this e-mail address or user ID. Raises NotFound."""
    for member in every(client, _members_path(project)):
        if reference == member["user_id"] or reference.lower() == (member["email"] or "").lower():
            return member
    name = project["name"]
    raise NotFound(f"{name} has no member {reference!r}; `mooring projects members ls {name}` lists all")
