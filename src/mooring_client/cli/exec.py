"""`mooring exec`: a command in a running instance."""

import sys
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
    from mooring_client.cli.terminal import Input, raw_terminal, terminal_size
    from mooring_client.stream_messages import Channel

    if tty and not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal here; leave out -t", param_hint="--tty")
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
        if tty:
            exits.enter_context(raw_terminal())
        if interactive:
            exits.enter_context(Input(running, tty=tty))
        for channel, data in running:
            write_all(outputs[channel], data)
    raise typer.Exit(Exit.ERROR if running.exit_code is None else running.exit_code)
