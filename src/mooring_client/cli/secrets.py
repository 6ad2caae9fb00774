"""`mooring secrets`: write-only values that instances get as environment variables."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.exits import Exit
from mooring_client.cli.output import Column, Format, FormatOption, age, show_list
from mooring_client.cli.resources import SECRET, every, find, for_each, is_id, project_names
from mooring_client.cli.session import connect, project_id, say
from mooring_client.errors import NameTaken

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Manage the secrets of your project.",
)

_LARGEST_BYTES = 131_072  # 32,768 characters, which the server checks


@app.command("ls")
def list_secrets(output: FormatOption = Format.TABLE) -> None:
    """List secrets, without their values.

    The JSON is a list of the objects of GET /v1/secrets.
    """
    with connect() as client:
        items = list(every(client, SECRET.path, project_id=project_id(client)))
        names = project_names(client) if items and output in {Format.TABLE, Format.WIDE} else {}
    columns = (
        Column("NAME", lambda row: row["name"]),
        Column("ID", lambda row: row["id"], wide=True),
        Column("PROJECT", lambda row: names.get(row["project_id"], "-")),
        Column("AGE", lambda row: age(row["created_at"])),
    )
    show_list(items, columns, output, empty="no secrets; `mooring secrets set NAME` creates one")


@app.command("set")
def set_secret(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=names_of(SECRET.path))],
    from_file: Annotated[
        Path | None, typer.Option("--from-file", "-f", help="the value is the file's whole content")
    ] = None,
) -> None:
    """Create a secret, or replace its value, which is read from the terminal or from stdin.

    It is never an argument, which other users of this machine could see. Of a value on stdin, one line break
    at the end is removed: echo "$TOKEN" | mooring secrets set hf-token
    """
    value = _read_value(name, from_file)
    with connect() as client:
        if _set(client, name, value):
            say("created; instances get it with `mooring run --secret`")
        else:
            say("replaced; instances that run keep the old value until they start again")
    print(name)


def _read_value(name: str, from_file: Path | None) -> str:
    if from_file is None and sys.stdin.isatty():
        try:
            return str(typer.prompt(f"value of {name}", hide_input=True, err=True))
        except typer.Abort:  # Ctrl-C or Ctrl-D
            raise typer.Exit(Exit.INTERRUPTED) from None
    try:
        if from_file is None:
            content = sys.stdin.buffer.read(_LARGEST_BYTES + 1)
        else:
            with from_file.open("rb") as file:
                content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise typer.BadParameter("the value is longer than 32,768 characters")
        value = content.decode()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {from_file or 'stdin'}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter("the value is not UTF-8 text; encode it, for example with base64") from None
    if from_file is None and value.endswith("\n"):
        value = value[:-1].removesuffix("\r")
    if not value:
        raise typer.BadParameter("the value is empty; pass it on stdin, or name a file with --from-file")
    return value


def _set(client: "Mooring", name: str, value: str) -> bool:
    """Create the secret, or replace its value if it exists. Returns whether it was created."""
    from mooring_client.calls import path

    if not is_id(name, SECRET.prefix):
        project = project_id(client)
        body = {"name": name, "value": value, **({"project_id": project} if project else {})}
        with suppress(NameTaken):
            client.request("POST", SECRET.path, body=body)
            return True
    client.request("PUT", path("/v1/secrets/{}", _find(client, name)["id"]), body={"value": value})
    return False


def _find(client: "Mooring", reference: str) -> Any:
    return find(client, SECRET, reference, project_id=project_id(client))


@app.command()
def rm(
    secrets: Annotated[
        list[str],
        typer.Argument(help="names or IDs", metavar="SECRET", autocompletion=names_of(SECRET.path)),
    ],
    yes: YesOption = False,
) -> None:
    """Delete secrets. Instances that name them can no longer start."""
    with connect() as client:
        found = [_find(client, secret) for secret in secrets]
        names = ", ".join(secret["name"] for secret in found)
        confirm(f"delete {names}? Instances that name a deleted secret can no longer start.", yes=yes)
        for_each(found, lambda secret: _delete(client, secret))


def _delete(client: "Mooring", secret: Any) -> str:
    from mooring_client.calls import path

    client.request("DELETE", path("/v1/secrets/{}", secret["id"]))
    return str(secret["name"])
