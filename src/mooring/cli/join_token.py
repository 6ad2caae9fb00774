"""`mooring join-token`: a token for a new node, on the machine of the server."""

from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from mooring.cli.common import open_database, sign_with_audit_keys
from mooring.control.nodes import joins
from mooring.core.access import on_host
from mooring_client.schemas.text import Name


def _check_name(given: str | None) -> str | None:
    try:
        return given and TypeAdapter[str](Name).validate_python(given)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"]) from None


def join_token(
    ttl_s: Annotated[int, typer.Option(min=1, max=86_400, help="lifetime of the token in seconds")] = 3600,
    node_name: Annotated[
        str | None, typer.Option(callback=_check_name, help="the only node that may join")
    ] = None,
) -> None:
    """Create a join token directly in the database, without an API key, and print it."""
    with open_database() as database:
        sign_with_audit_keys(database)
        with database.write() as session:
            _token, secret = joins.create_join_token(session, on_host("join_token.create"), ttl_s, node_name)
    typer.echo(secret)
