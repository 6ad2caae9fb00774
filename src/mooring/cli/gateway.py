"""`mooring gateway`: SSH and HTTP into instances, in a process of its own."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from cryptography.fernet import InvalidToken

from mooring.cli.common import explained_problems, open_database, sign_with_audit_keys
from mooring.control import gateway_keys
from mooring.control.tenants.encryption import KEY_FILE, Encryptor
from mooring.gateway.gateway import CannotListen, Gateway, GatewayAddresses
from mooring.settings import Settings, is_loopback
from mooring_client.errors import Unavailable


def run(settings: Settings, *, ends_with_parent: bool) -> None:
    """Run the gateway in this process until it is stopped.

    Args:
        ends_with_parent: also stop when the standard input ends, as it does when `mooring up` ends.
    """
    _require_url(settings)
    if ends_with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with open_database() as database:
        sign_with_audit_keys(database)
        keys = encryptor(settings)
        with explained_keys(), database.read() as session:
            gateway_keys.host_keys(session, keys)
        with explained_problems():
            try:
                Gateway(settings, database, keys, _print_addresses).run()
            except CannotListen as error:
                _exit(str(error))


def _require_url(settings: Settings) -> None:
    if settings.gateway_url is None and not is_loopback(settings.gateway_host):
        _exit(
            "MOORING_GATEWAY_URL: set the URL at which nodes reach this gateway, such as "
            "https://gateway-1.example.org (a TLS proxy in front of MOORING_GATEWAY_PORT)"
        )


def encryptor(settings: Settings) -> Encryptor:
    """Encrypts with the server's keys, or exits and says where they should be."""
    if settings.encryption_keys is not None:
        return Encryptor(settings.encryption_keys.get_secret_value().split(","))
    # Never created here: a new key would not be the server's.
    file = settings.data_dir / KEY_FILE
    if not file.exists():
        _exit(f"MOORING_ENCRYPTION_KEYS: set it to the server's keys, or copy its {file} to this machine")
    return Encryptor(file.read_text().split())


@contextmanager
def explained_keys() -> Iterator[None]:
    """Exit, and say what to do, if the gateways' keys cannot be read."""
    try:
        yield
    except InvalidToken:
        _exit(f"MOORING_ENCRYPTION_KEYS (or {KEY_FILE}) does not have the server's encryption key")
    except Unavailable as error:
        _exit(error.message)


def _exit(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    signal.raise_signal(signal.SIGTERM)


def _print_addresses(addresses: GatewayAddresses) -> None:
    typer.echo(f"  Gateway      {addresses.nodes} (for nodes)")
    if addresses.ssh_port is not None:
        typer.echo(f"  SSH          port {addresses.ssh_port}")
    if addresses.proxy_url is not None:
        typer.echo(f"  Ports        {addresses.proxy_url}")
    if addresses.docker_port is not None:
        typer.echo(f"  Docker       port {addresses.docker_port}")
