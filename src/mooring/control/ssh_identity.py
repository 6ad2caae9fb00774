"""The private keys of the gateways: made once, the same on all of them, stored encrypted.

The host key shows clients that they talk to the service. The CA key signs user certificates.
"""

from collections.abc import Callable
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.tenants.encryption import Encryptor
from mooring.db.tables import ControlPlane

_OPENSSH: Final = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def ensure(session: Session, encryptor: Encryptor) -> None:
    """Create the keys at the first start."""
    row = session.scalars(select(ControlPlane)).one()
    row.sealed_ssh_host_key = row.sealed_ssh_host_key or encryptor.encrypt(_new_key())
    row.sealed_ssh_ca_key = row.sealed_ssh_ca_key or encryptor.encrypt(_new_key())


def _new_key() -> bytes:
    """32 bytes: the row that has them is updated often, and must stay small (`db.readiness`)."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def host_key(session: Session, encryptor: Encryptor) -> bytes:
    """The private host key, in OpenSSH's format. Raises InvalidToken: it needs another encryption key."""
    return _decrypted(session, encryptor, lambda row: row.sealed_ssh_host_key).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def ca_key(session: Session, encryptor: Encryptor) -> Ed25519PrivateKey:
    """The key that signs user certificates. Raises InvalidToken: as `host_key`."""
    return _decrypted(session, encryptor, lambda row: row.sealed_ssh_ca_key)


def _decrypted(
    session: Session, encryptor: Encryptor, column: Callable[[ControlPlane], bytes | None]
) -> Ed25519PrivateKey:
    encrypted = column(session.scalars(select(ControlPlane)).one())
    assert encrypted is not None  # see `ensure`
    return Ed25519PrivateKey.from_private_bytes(encryptor.decrypt(encrypted))


def public_host_key(session: Session, encryptor: Encryptor) -> str:
    """The public host key, as in a line of `known_hosts`."""
    key = _decrypted(session, encryptor, lambda row: row.sealed_ssh_host_key)
    return key.public_key().public_bytes(*_OPENSSH).decode()


def public_ca_key(session: Session, encryptor: Encryptor) -> str:
    """The public key of the CA: type and base64."""
    return ca_key(session, encryptor).public_key().public_bytes(*_OPENSSH).decode()
