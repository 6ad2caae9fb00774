"""`mooring gateway-keys`: the keys of all gateways, directly in the database."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooring.cli.common import open_database, read_settings, sign_with_audit_keys

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from mooring.control.ssh_identity import GatewayKeyKind
    from mooring.control.tenants.encryption import Encryptor
    from mooring.core.access import Access

app = typer.Typer(help="Rotate the keys of the gateways: the host key and the CA key.", no_args_is_help=True)

# By the kind of key and how many there are; the oldest first.
_USES: Final = {
    ("host", 1): ("used",),
    ("host", 2): ("used until it is retired", "used after that"),
    ("ca", 1): ("signs",),
    ("ca", 2): ("trusted until it is retired", "signs"),
}

Host = Annotated[bool, typer.Option("--host", help="the key that clients pin")]
Ca = Annotated[bool, typer.Option("--ca", help="the key that signs user certificates")]


@app.command()
def show() -> None:
    """Print the fingerprint of each key, and what it is for."""
    from mooring.cli.gateway import explained_keys  # noqa: PLC0415
    from mooring.control import ssh_identity  # noqa: PLC0415
    from mooring.control.ssh_identity import GatewayKeyKind  # noqa: PLC0415

    encryptor = _encryptor()
    with open_database() as database, explained_keys(), database.read() as session:
        for kind in GatewayKeyKind:
            keys = ssh_identity.fingerprints(session, encryptor, kind)
            for key, use in zip(keys, _USES[kind, len(keys)], strict=True):
                typer.echo(f"{kind:5} {key}  {use}")


@app.command()
def rotate(host: Host = False, ca: Ca = False) -> None:
    """Add a new key beside the old one; running gateways follow within seconds.

    Clients with `UpdateHostKeys yes` learn the new host key when they connect. New certificates are signed
    with the new CA key, and those signed with the old one stay valid.
    """
    from mooring.control import ssh_identity  # noqa: PLC0415

    _change(ssh_identity.rotate, "gateway_keys.rotate", host=host, ca=ca)
    show()


@app.command()
def retire(host: Host = False, ca: Ca = False) -> None:
    """Remove the old key; running gateways follow within seconds.

    Clients that have not learned the new host key refuse to connect. Certificates that the old CA key signed
    are no longer accepted; open connections stay.
    """
    from mooring.control import ssh_identity  # noqa: PLC0415

    _change(ssh_identity.retire, "gateway_keys.retire", host=host, ca=ca)
    show()


def _change(
    change: "Callable[[Session, Access, Encryptor, GatewayKeyKind], None]",
    action: str,
    *,
    host: bool,
    ca: bool,
) -> None:
    from mooring.cli.gateway import explained_keys  # noqa: PLC0415
    from mooring.control.ssh_identity import GatewayKeyKind  # noqa: PLC0415
    from mooring.core.access import on_host  # noqa: PLC0415
    from mooring.core.errors import Conflict  # noqa: PLC0415

    kinds = [kind for kind, chosen in ((GatewayKeyKind.HOST, host), (GatewayKeyKind.CA, ca)) if chosen]
    if not kinds:
        raise typer.BadParameter("say which keys: --host, --ca or both")
    encryptor = _encryptor()
    with open_database() as database:
        sign_with_audit_keys(database)
        try:
            with explained_keys(), database.write() as session:
                for kind in kinds:
                    change(session, on_host(action), encryptor, kind)
        except Conflict as error:
            typer.echo(error.message, err=True)
            raise typer.Exit(2) from None


def _encryptor() -> "Encryptor":
    from mooring.cli.gateway import encryptor  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    return encryptor(read_settings(Settings))
