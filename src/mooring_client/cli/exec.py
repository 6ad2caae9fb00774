"""`mooring exec`: a command in a running instance."""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import typer

from mooring_client.cli import values
from mooring_client.cli.completion import InstanceArgument
from mooring_client.cli.exits import Exit
from mooring_client.cli.session import connect, find_instance


def exec_command(
    instance: InstanceArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD [ARG]...")],
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="pass your input on")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="run it in a terminal")] = False,
    user: Annotated[str | None, typer.Option("--user", "-u", help="name or uid, and :group")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=value, or NAME as it is here")
    ] = None,
) -> None:
    """Run a command in an instance, and exit with its exit code. Ctrl-C kills it.

    mooring exec -it train-1 -- bash
    """
    from mooring_client.cli.attached import write_all
    from mooring_client.cli.foreground import foreground
    from mooring_client.cli.terminal import copy_input, raw_terminal, require_terminal, terminal_size
    from mooring_client.stream_messages import Channel

    if tty:
        require_terminal()
    width, height = terminal_size() if tty else (None, None)
    outputs = {Channel.STDOUT: sys.stdout.fileno(), Channel.STDERR: sys.stderr.fileno()}
    with connect() as client, ExitStack() as exits:
        found = find_instance(client, instance)
        running = exits.enter_context(
            client.instances.exec_stream(
                found["id"],
                command,
                tty=tty,
                stdin=interactive,
                user=user,
                working_dir=workdir,
                env=values.environment(env or (), (), ()),
                width=width,
                height=height,
            )
        )
        handlers: dict[int, Callable[[], None]] = {}
        if tty:
            exits.enter_context(raw_terminal())
            handlers[signal.SIGWINCH] = lambda: running.resize(*terminal_size())
        if interactive:
            copy_input(running)

        def copy_output() -> None:
            for channel, data in running:
                write_all(outputs[channel], data)

        foreground(copy_output, handlers)
    raise typer.Exit(Exit.ERROR if running.exit_code is None else running.exit_code)
