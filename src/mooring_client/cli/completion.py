"""Completion in shells: the script, and names from the API."""

from typing import Annotated, Any

import typer

from mooring_client.cli.session import connect

_SHELLS = ("bash", "zsh", "fish")
# A shell waits for these names while its user types.
_WITHIN_S = 0.3
_MOST = 200


def names_of(path: str) -> Any:
    """A function that completes the names of a list of the API; without a server, nothing is completed."""

    def complete(incomplete: str) -> list[str]:
        try:
            with connect(timeout_s=_WITHIN_S, max_retries=0) as client:
                items = client.request("GET", path, params={"limit": _MOST})["items"]
        except Exception:
            return []  # a message would end up in the command line
        names = [str(item.get("name", "")) for item in items]
        # A shell would take a name with spaces for several words.
        return [name for name in names if name.startswith(incomplete) and len(name.split()) == 1]

    return complete


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
