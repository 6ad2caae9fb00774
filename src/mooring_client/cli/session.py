"""What all commands share: the options before the command, the client, and names instead of IDs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.errors import NotFound
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring


@dataclass
class _Options:
    context: str | None = None
    project: str | None = None


_options = _Options()
_IDS = {"instance": "ins_", "node": "nod_", "project": "prj_", "group": "grp_"}


def root_options(
    context: Annotated[
        str | None, typer.Option("--context", help="the context to use; see `mooring login`")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", "-p", help="name or ID of the project to work in")
    ] = None,
) -> None:
    """GPU-as-a-Service on the GPU servers you own."""
    _options.context, _options.project = context, project


def chosen_context() -> str | None:
    """The context of `--context`."""
    return _options.context


def chosen_project() -> str | None:
    """The project of `--project`."""
    return _options.project


def connect(**settings: Any) -> "Mooring":
    """A client of the chosen server. Commands use it in a `with` statement.

    Args:
        settings: those of `Mooring`, such as `timeout_s`.

    Raises:
        NotConfigured: there is no server or no key.
    """
    from mooring_client.sync.client import Mooring

    return Mooring(context=_options.context, **settings)


def project_id(client: "Mooring") -> str | None:
    """The ID of the chosen project; None: the key's own, or the default project.

    Raises:
        NotFound: there is no such project, or you cannot see it.
    """
    wanted = _options.project or client.endpoint.project
    if wanted is None or wanted.startswith(_IDS["project"]):
        return wanted
    for project in client.projects.list(name=wanted):
        return project.id
    raise NotFound(f"there is no project {wanted!r} that you can see")


def find_instance(client: "Mooring", reference: str) -> dict[str, Any]:
    """The instance with this ID or name, as JSON. Of several with the name, the one that has not ended.

    Raises:
        NotFound: there is none.
    """
    from mooring_client.calls import path

    if not reference:  # as from `mooring rm "$UNSET"`; a list without this filter has all
        raise NotFound("the name of the instance is empty")
    if reference.startswith(_IDS["instance"]):
        return dict(client.request("GET", path("/v1/instances/{}", reference)))
    params = {"name": reference, "project_id": project_id(client)}
    found = client.request("GET", "/v1/instances", params=params)["items"]
    if not found:
        raise NotFound(f"there is no instance {reference!r}; `mooring ps -a` lists all")
    return meant(found)


ENDED = frozenset({"stopped", "succeeded", "failed"})


def meant(of_one_name: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several instances with one name, the one that has not ended, or the newest."""
    return next((each for each in of_one_name if each["state"] not in ENDED), of_one_name[0])


def say(message: str) -> None:
    """Print a message for the user: on stderr, so that stdout has only data."""
    # It may have names and messages that others chose.
    print("\n".join(map(clean_line, message.split("\n"))), file=sys.stderr, flush=True)
