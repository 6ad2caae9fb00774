"""Ports of instances: `mooring forward` and `mooring open`."""

import sys
import threading
from typing import Annotated

import typer

from mooring_client.cli.completion import InstanceArgument
from mooring_client.cli.exits import message_of
from mooring_client.cli.session import connect, find_instance, say


def forward(
    instance: InstanceArgument,
    port: Annotated[str, typer.Argument(metavar="[LOCAL:]PORT", help="8888, or 9000:8888")],
    address: Annotated[str, typer.Option(help="local address to listen on")] = "127.0.0.1",
) -> None:
    """Forward a local port to a port of an instance, until Ctrl-C. The port need not be published."""
    local, _, remote = port.rpartition(":")
    if not remote.isdecimal() or (local and not local.isdecimal()):
        raise typer.BadParameter(f"{port!r} is not PORT or LOCAL:PORT", param_hint="PORT")
    with connect() as client:
        found = find_instance(client, instance)
        try:
            with client.instances.forward(
                found["id"],
                int(remote),
                local_port=int(local or remote),
                local_host=address,
                report=lambda failure: say(message_of(failure)),
            ) as listening:
                say(f"forwarding {address}:{listening} to port {remote} of {found['name']}; Ctrl-C ends it")
                threading.Event().wait()
        except OSError as error:
            say(f"mooring: cannot listen on {address}:{local or remote}: {error}; try 9000:{remote}")
            raise typer.Exit(1) from None


def open_port(
    instance: InstanceArgument,
    port: Annotated[int | None, typer.Argument(help="default: its first port with a URL")] = None,
    show: Annotated[bool, typer.Option("--print", help="print the link instead of opening it")] = False,
) -> None:
    """Open a port of an instance in the browser, by a link that works once."""
    with connect() as client:
        found = find_instance(client, instance)
        served = [each["container"] for each in found["endpoints"] if each["url"]]
        if port is None and not served:
            say(f"mooring: {found['name']} has no port behind the proxy; `mooring forward` works without")
            raise typer.Exit(1)
        link = client.instances.link(found["id"], port or served[0])
    if show or not sys.stdout.isatty():
        print(link.url)
    else:
        say(f"opening {link.url}")
        typer.launch(link.url)
