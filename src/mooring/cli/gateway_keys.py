"""`mooring gateway-keys`: the keys of all gateways, directly in the database."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooring.cli.common import open_database, read_settings, sign_with_audit_keys

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from mooring.control.gateway_keys import GatewayKeyKind
    from mooring.control.tenants.encryption import Encryptor
    from mooring.core.access import Access

app = typer.Typer(
    help="Show and rotate the keys of the gateways: of the host, certificates and links.",
    no_args_is_help=True,
)

# By the kind of key and how many there are; the oldest first.
_USES: Final = {
    ("host", 1): ("used",),
    ("host", 2): ("used until it is retired", "used after that"),
    ("ca", 1): ("signs",),
    ("ca", 2): ("trusted until it is retired", "signs"),
    ("link", 1): ("signs",),
    ("link", 2): ("trusted until it is retired", "signs"),
}

Host = Annotated[bool, typer.Option("--host", help="the key that clients pin")]
Ca = Annotated[bool, typer.Option("--ca", help="the key that signs user certificates")]
Link = Annotated[bool, typer.Option("--link", help="the key that signs links to ports")]


@app.command()
def show() -> None:
    """Print the fingerprint of each key, and what it is for."""
    from mooring.cli.gateway import explained_keys  # noqa: PLC0415
    from mooring.control import gateway_keys  # noqa: PLC0415
    from mooring.control.gateway_keys import GatewayKeyKind  # noqa: PLC0415

    encryptor = _encryptor()
    with open_database() as database, explained_keys(), database.read() as session:
        for kind in GatewayKeyKind:
            keys = gateway_keys.fingerprints(session, encryptor, kind)
            for key, use in zip(keys, _USES[kind, len(keys)], strict=True):
                typer.echo(f"{kind:5} {key}  {use}")


@app.command()
def rotate(host: Host = False, ca: Ca = False, link: Link = False) -> None:
    """Add a new key beside the old one; running gateways follow within seconds.

    Clients with `UpdateHostKeys yes` learn the new host key when they connect. New certificates, links and
    cookies are signed with the new key, and those signed with the old one stay valid.
    """
    from mooring.control import gateway_keys  # noqa: PLC0415

    _change(gateway_keys.rotate, "gateway_keys.rotate", host=host, ca=ca, link=link)
    show()


@app.command()
def retire(host: Host = False, ca: Ca = False, link: Link = False) -> None:
    """Remove the old key; running gateways follow within seconds.

    Clients that have not learned the new host key refuse to connect. What the old CA key or link key
    has signed is no longer accepted; open connections stay.
    """
    from mooring.control import gateway_keys  # noqa: PLC0415

    _change(gateway_keys.retire, "gateway_keys.retire", host=host, ca=ca, link=link)
    show()


def _change(
    change: "Callable[[Session, Access, Encryptor, GatewayKeyKind], None]",
    action: str,
    *,
    host: bool,
    ca: bool,
    link: bool,
) -> None:
    from mooring.cli.gateway import explained_keys  # noqa: PLC0415
    from mooring.control.gateway_keys import GatewayKeyKind  # noqa: PLC0415
    from mooring.core.access import on_host  # noqa: PLC0415
    from mooring_client.errors import Conflict  # noqa: PLC0415

    chosen = {GatewayKeyKind.HOST: host, GatewayKeyKind.CA: ca, GatewayKeyKind.LINK: link}
    kinds = [kind for kind in GatewayKeyKind if chosen[kind]]
    if not kinds:
        raise typer.BadParameter("say which keys: --host, --ca, --link or several of them")
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
