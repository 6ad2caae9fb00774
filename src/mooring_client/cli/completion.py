"""Completion in shells: the script, and names from the API."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from mooring_client.cli.session import connect

_SHELLS = ("bash", "zsh", "fish")
# A shell waits for these names while its user types.
_WITHIN_S = 0.3
_PAGE = 200


def names_of(path: str) -> Any:
    """A function that completes the names of a list of the API; without a server, nothing is completed."""

    def complete(incomplete: str) -> list[str]:
        names: list[str] = []
        with suppress(Exception):  # a message would end up in the command line
            names += _names(path)
        # A shell would take a name with spaces for several words.
        return [name for name in names if name.startswith(incomplete) and len(name.split()) == 1]

    return complete


def _names(path: str) -> Iterator[str]:
    """Yield the names of a list: of all pages that come in time."""
    params = {"limit": str(_PAGE)}
    with connect(timeout_s=_WITHIN_S, max_retries=0) as client:
        until = time.monotonic() + _WITHIN_S
        while True:
            page = client.request("GET", path, params=params)
            yield from (str(item.get("name", "")) for item in page["items"])
            if page["next_cursor"] is None or time.monotonic() > until:
                return
            params["cursor"] = page["next_cursor"]


InstanceArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="INSTANCE", autocompletion=names_of("/v1/instances"))
]
InstancesArgument = Annotated[
    list[str],
    typer.Argument(help="names or IDs", metavar="INSTANCE...", autocompletion=names_of("/v1/instances")),
]
NodeArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="NODE", autocompletion=names_of("/v1/nodes"))
]


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish", metavar="SHELL")] = "bash",
) -> None:
    """Print the completion script of a shell.

    bash: eval "$(mooring completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc. fish: mooring completion
    fish > ~/.config/fish/completions/mooring.fish
    """
    from typer._completion_shared import get_completion_script

    if shell not in _SHELLS:
        raise typer.BadParameter(f"choose one of {', '.join(_SHELLS)}", param_hint="SHELL")
    print(get_completion_script(prog_name="mooring", complete_var="_MOORING_COMPLETE", shell=shell))
