"""Questions before what cannot be undone: asked on a terminal; elsewhere the user must give `--yes`."""

import sys
from typing import Annotated

import typer

from mooring_client.cli.exits import Exit
from mooring_client.cli.session import say
from mooring_client.terminal_text import clean_line

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do it without a question")]


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the user agrees.

    Args:
        question: what will happen, such as `delete the project vision?`.

    Raises:
        typer.Exit: the user did not agree, or there is no terminal to ask on.
    """
    if yes:
        return
    question = clean_line(question)  # a name may contain sequences that forge what a terminal shows
    if not sys.stdin.isatty():
        say(f"mooring: {question} There is no terminal to ask on; add --yes if you are sure")
        raise typer.Exit(Exit.USAGE)
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D
        raise typer.Exit(Exit.INTERRUPTED) from None
    if not agreed:
        say("nothing was changed")
        raise typer.Exit(Exit.ERROR)
