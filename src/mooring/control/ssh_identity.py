"""The private keys of the gateways: the same on all of them, stored encrypted, changed by the operator only.

The host key shows clients that they talk to the service. The CA key signs user certificates. A rotation has
two steps, with two keys in between, so that clients can learn a new host key, and certificates can expire.
"""

from base64 import b64decode
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.tenants.encryption import Encryptor
from mooring.core.access import Access
from mooring.core.errors import Conflict, Unavailable
from mooring.core.ssh_public_keys import fingerprint
from mooring.db.tables import ControlPlane

_OPENSSH: Final = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
_KEY_BYTES: Final = 32
_NO_KEYS: Final = "the gateways have no keys yet: start the server first"


class GatewayKeyKind(StrEnum):
    HOST = "host"
    CA = "ca"


def ensure(session: Session, encryptor: Encryptor) -> None:
    """Create the keys at the first start."""
    row = session.scalars(select(ControlPlane)).one()
    for kind in GatewayKeyKind:
        if _encrypted(row, kind) is None:
            _store(row, encryptor, kind, [_new_key()])


def rotate(session: Session, access: Access, encryptor: Encryptor, kind: GatewayKeyKind) -> None:
    """Add a key. The old host key is used and both are shown; the new CA key signs and both are trusted.

    Raises:
        Conflict: there are two already.
        InvalidToken, Unavailable: as `host_keys`.
    """
    row, keys = _locked(session, encryptor, kind)
    if len(keys) > 1:
        raise Conflict(f"there are two {kind} keys already: first retire the old one")
    _store(row, encryptor, kind, [*keys, _new_key()])
    _record(session, access, keys, _keys(row, encryptor, kind))


def retire(session: Session, access: Access, encryptor: Encryptor, kind: GatewayKeyKind) -> None:
    """Remove the old key.

    Raises:
        Conflict: there is only one.
        InvalidToken, Unavailable: as `host_keys`.
    """
    row, keys = _locked(session, encryptor, kind)
    if len(keys) == 1:
        raise Conflict(f"there is only one {kind} key: first rotate it")
    _store(row, encryptor, kind, keys[1:])
    _record(session, access, keys, keys[1:])


def _record(
    session: Session, access: Access, before: Sequence[Ed25519PrivateKey], after: Sequence[Ed25519PrivateKey]
) -> None:
    old, new = ({"keys": [_fingerprint(key) for key in keys]} for keys in (before, after))
    audit_log.record(session, access, None, None, before=old, after=new)


def encrypted_keys(session: Session) -> tuple[bytes | None, ...]:
    """The encrypted keys, which differ after each change."""
    row = _row(session)
    return tuple(_encrypted(row, kind) for kind in GatewayKeyKind)


def host_keys(session: Session, encryptor: Encryptor) -> list[bytes]:
    """The private host keys in OpenSSH's format, oldest first.

    Raises:
        InvalidToken: wrong encryption key.
        Unavailable: no server has created them yet.
    """
    return [
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        for key in _keys_now(session, encryptor, GatewayKeyKind.HOST)
    ]


def ca_key(session: Session, encryptor: Encryptor) -> Ed25519PrivateKey:
    """The key that signs user certificates. Raises InvalidToken, Unavailable: as `host_keys`."""
    return _keys_now(session, encryptor, GatewayKeyKind.CA)[-1]


def public_keys(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> list[str]:
    """Type and base64 of each key, oldest first. Raises InvalidToken, Unavailable: as `host_keys`."""
    return [_public(key) for key in _keys_now(session, encryptor, kind)]


def fingerprints(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> list[str]:
    """As `ssh-keygen -l` shows them, oldest first. Raises InvalidToken, Unavailable: as `host_keys`."""
    return [_fingerprint(key) for key in _keys_now(session, encryptor, kind)]


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(*_OPENSSH).decode()


def _fingerprint(key: Ed25519PrivateKey) -> str:
    return fingerprint(b64decode(_public(key).split()[1]))


# The stored form: 32 bytes for each key. The row is updated often, and must stay small (`db.readiness`).


def _new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def _encrypted(row: ControlPlane, kind: GatewayKeyKind) -> bytes | None:
    return row.sealed_ssh_host_key if kind is GatewayKeyKind.HOST else row.sealed_ssh_ca_key


def _store(
    row: ControlPlane, encryptor: Encryptor, kind: GatewayKeyKind, keys: Sequence[Ed25519PrivateKey]
) -> None:
    encrypted = encryptor.encrypt(b"".join(key.private_bytes_raw() for key in keys))
    if kind is GatewayKeyKind.HOST:
        row.sealed_ssh_host_key = encrypted
    else:
        row.sealed_ssh_ca_key = encrypted


def _keys(row: ControlPlane, encryptor: Encryptor, kind: GatewayKeyKind) -> list[Ed25519PrivateKey]:
    encrypted = _encrypted(row, kind)
    if encrypted is None:
        raise Unavailable(_NO_KEYS)
    joined = encryptor.decrypt(encrypted)
    starts = range(0, len(joined), _KEY_BYTES)
    return [Ed25519PrivateKey.from_private_bytes(joined[at : at + _KEY_BYTES]) for at in starts]


def _keys_now(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> list[Ed25519PrivateKey]:
    return _keys(_row(session), encryptor, kind)


def _locked(
    session: Session, encryptor: Encryptor, kind: GatewayKeyKind
) -> tuple[ControlPlane, list[Ed25519PrivateKey]]:
    row = _row(session, is_locked=True)
    return row, _keys(row, encryptor, kind)


def _row(session: Session, *, is_locked: bool = False) -> ControlPlane:
    query = select(ControlPlane)
    row = session.scalars(query.with_for_update() if is_locked else query).one_or_none()
    if row is None:
        raise Unavailable(_NO_KEYS)
    return row
