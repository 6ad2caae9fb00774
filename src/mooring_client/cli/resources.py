"""Resources by their name or ID, and whole lists of them, as the API's JSON."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from mooring_client.cli.completion import names_of
from mooring_client.cli.exits import exit_of, message_of
from mooring_client.cli.session import say
from mooring_client.errors import MooringError, NotFound
from mooring_client.failures import BadAnswer
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

T = TypeVar("T")
_PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of resource with names.

    Attributes:
        prefix: what its IDs begin with, without the `_`.
        path: of its list, which can be filtered by `name`.
        listed_by: the command that lists all.
    """

    noun: str
    prefix: str
    path: str
    listed_by: str


NODE: Final = Kind("node", "nod", "/v1/nodes", "mooring nodes ls")
PROJECT: Final = Kind("project", "prj", "/v1/projects", "mooring projects ls")
SECRET: Final = Kind("secret", "sec", "/v1/secrets", "mooring secrets ls")
WEBHOOK: Final = Kind("webhook", "whk", "/v1/webhooks", "mooring webhooks ls")
VOLUME: Final = Kind("volume", "vol", "/v1/volumes", "mooring volumes ls")

ProjectArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="PROJECT", autocompletion=names_of(PROJECT.path))
]


def every(client: "Mooring", path: str, **params: Any) -> Iterator[Any]:
    """The items of all pages of a list. Parameters that are None are not sent."""
    sent = {"limit": _PAGE, **params}
    while True:
        page = client.request("GET", path, params=sent)
        yield from page["items"]
        if page["next_cursor"] is None:
            return
        if page["next_cursor"] == sent.get("cursor"):
            raise BadAnswer("the server answers the same page again; check the URL")
        sent["cursor"] = page["next_cursor"]


def is_id(text: str, prefix: str) -> bool:
    """Whether a text is an ID, not a name: names of secrets and keys may begin like one."""
    return re.fullmatch(rf"{prefix}_[0-9a-hjkmnp-tv-z]{{26}}", text) is not None


def find(client: "Mooring", kind: Kind, reference: str, **params: Any) -> Any:
    """The resource with this ID or name.

    Args:
        params: further filters of the list, such as `project_id`.

    Raises:
        NotFound: there is none that you can see.
        typer.BadParameter: several projects have one with this name.
    """
    from mooring_client.calls import path

    if is_id(reference, kind.prefix):
        return client.request("GET", f"{kind.path}{path('/{}', reference)}")
    found = client.request("GET", kind.path, params={"name": reference, **params})["items"]
    if not found:
        raise NotFound(
            f"there is no {kind.noun} {reference!r} that you can see; `{kind.listed_by}` lists all"
        )
    if len(found) > 1:
        raise typer.BadParameter(
            f"{len(found)} projects have a {kind.noun} {reference!r}; say which: mooring -p PROJECT …"
        )
    return found[0]


def find_node(client: "Mooring", reference: str) -> Any:
    """The node with this ID or name. Raises NotFound."""
    return find(client, NODE, reference)


def find_project(client: "Mooring", reference: str) -> Any:
    """The project with this ID or name; found by name, without its usage. Raises NotFound."""
    return find(client, PROJECT, reference)


def find_user(client: "Mooring", reference: str) -> str:
    """The ID of the user with this ID or e-mail address.

    Raises:
        NotFound: there is none; only admins and owners of projects can search.
    """
    if is_id(reference, "usr"):
        return reference
    for user in client.request("GET", "/v1/users", params={"email": reference})["items"]:
        return str(user["id"])
    raise NotFound(f"there is no user with the e-mail address {reference!r}; an admin creates users")


def project_names(client: "Mooring") -> dict[str, str]:
    """ID -> name of the projects that you can see."""
    return {project["id"]: project["name"] for project in every(client, PROJECT.path)}


def for_each(items: Iterable[T], act: Callable[[T], str]) -> None:
    """Act on each item, and print the name that is returned. A failure does not keep the others from it.

    Raises:
        typer.Exit: at the end, with the exit code of the first failure.
    """
    worst = 0
    for item in items:
        try:
            print(clean_line(act(item)))  # others choose names, and could forge what a terminal shows
        except MooringError as failure:
            say(message_of(failure))
            worst = worst or exit_of(failure)
    if worst:
        raise typer.Exit(worst)
