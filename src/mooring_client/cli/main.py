"""The `mooring` command: finds the command, runs it, and turns failures into messages and exit codes.

Every command is imported only when it runs. `mooring --help` needs none of them: the table of commands has
their short descriptions. The server's distribution adds its own table by an entry point.
"""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from mooring_client.cli.commands import COMMANDS, Section
from mooring_client.cli.exits import reported
from mooring_client.cli.session import root_options

COMPLETE: Final = "_MOORING_COMPLETE"  # shells set it, as cli/completion.py tells them
ENTRY_POINTS: Final = "mooring.commands"


def sections() -> Iterator[Section]:
    """The commands of the client, then those of other distributions that are installed.

    A search for distributions takes 10 ms, which commands of the client are spared.
    """
    yield from COMMANDS
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS):
        yield from entry.load()


class LazyGroup(TyperGroup):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for section in sections() for name, each in section.commands.items() if not each.hidden]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for section in sections():
            if cmd_name in section.commands:
                if section.prepare:
                    _attribute(section.prepare)()
                return _command(cmd_name, _attribute(section.commands[cmd_name].target))
        return None

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader, such as `head`, has what it wants. Python must not try to flush again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section in sections():
            with formatter.section(section.title):
                shown = [(name, each.help) for name, each in section.commands.items() if not each.hidden]
                formatter.write_dl(shown)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        from typer._click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=each.help)
            for section in sections()
            for name, each in section.commands.items()
            if name.startswith(incomplete) and not each.hidden
        ]


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        target.rich_markup_mode = None  # the plain help; rich would take 100 ms
        command = typer.main.get_command(target)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(target)
        command = typer.main.get_command(single)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="mooring",
    help="GPU-as-a-Service on the GPU servers you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(root_options)


def main() -> None:
    """Run the command of this process, and exit with its code."""
    if COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()  # typer does it only for its own option, `--install-completion`
    with reported():
        app(prog_name="mooring", complete_var=COMPLETE)
