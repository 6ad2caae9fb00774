"""The private keys of the gateways: the same on all of them, stored encrypted, changed by the operator only.

The host key shows clients that they talk to the service. The CA key signs user certificates. The link key
signs links and cookies of the port proxy. A rotation has two steps, with two keys in between, so that clients
can learn a new host key, and certificates, links and cookies can expire.
"""

import hmac
from base64 import b64decode
from collections.abc import Sequence
from enum import StrEnum
from secrets import token_bytes
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.tenants.encryption import Encryptor
from mooring.core.access import Access
from mooring.core.ssh_public_keys import fingerprint
from mooring.db.tables import ControlPlane
from mooring_client.errors import Conflict, Unavailable

_OPENSSH: Final = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
_KEY_BYTES: Final = 32
_NO_KEYS: Final = "the gateways have no keys yet: start the server first"


class GatewayKeyKind(StrEnum):
    HOST = "host"
    CA = "ca"
    LINK = "link"


# The column of each kind. It has all keys of the kind, oldest first.
_COLUMNS: Final = {
    GatewayKeyKind.HOST: ControlPlane.sealed_ssh_host_key,
    GatewayKeyKind.CA: ControlPlane.sealed_ssh_ca_key,
    GatewayKeyKind.LINK: ControlPlane.sealed_port_key,
}


def ensure(session: Session, encryptor: Encryptor) -> None:
    """Create the keys at the first start."""
    row = session.scalars(select(ControlPlane)).one()
    for kind in GatewayKeyKind:
        if _encrypted(row, kind) is None:
            _store(row, encryptor, kind, [token_bytes(_KEY_BYTES)])


def rotate(session: Session, access: Access, encryptor: Encryptor, kind: GatewayKeyKind) -> None:
    """Add a key. The old host key is used and both are shown; the new CA or link key signs, both are trusted.

    Raises:
        Conflict: there are two already.
        InvalidToken, Unavailable: as `host_keys`.
    """
    row, keys = _locked(session, encryptor, kind)
    if len(keys) > 1:
        raise Conflict(f"there are two {kind} keys already: first retire the old one")
    after = [*keys, token_bytes(_KEY_BYTES)]
    _store(row, encryptor, kind, after)
    _record(session, access, kind, keys, after)


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
    _record(session, access, kind, keys, keys[1:])


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
        _pair(key).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        for key in _keys_now(session, encryptor, GatewayKeyKind.HOST)
    ]


def ca_key(session: Session, encryptor: Encryptor) -> Ed25519PrivateKey:
    """The key that signs user certificates. Raises InvalidToken, Unavailable: as `host_keys`."""
    return _pair(_keys_now(session, encryptor, GatewayKeyKind.CA)[-1])


def link_keys(session: Session, encryptor: Encryptor) -> list[bytes]:
    """The newest signs, and all are trusted. Raises InvalidToken, Unavailable: as `host_keys`."""
    return _keys_now(session, encryptor, GatewayKeyKind.LINK)


def public_host_keys(session: Session, encryptor: Encryptor) -> list[str]:
    """Type and base64 of each key, oldest first. Raises InvalidToken, Unavailable: as `host_keys`."""
    return [_public(key) for key in _keys_now(session, encryptor, GatewayKeyKind.HOST)]


def public_ca_keys(session: Session, encryptor: Encryptor) -> list[str]:
    """As `public_host_keys`."""
    return [_public(key) for key in _keys_now(session, encryptor, GatewayKeyKind.CA)]


def fingerprints(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> list[str]:
    """Of each key, oldest first: as `ssh-keygen -l` shows it, or of a link key something similar.

    Raises:
        InvalidToken, Unavailable: as `host_keys`.
    """
    return [_fingerprint(key, kind) for key in _keys_now(session, encryptor, kind)]


def _pair(key: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key)


def _public(key: bytes) -> str:
    return _pair(key).public_key().public_bytes(*_OPENSSH).decode()


def _fingerprint(key: bytes, kind: GatewayKeyKind) -> str:
    if kind is GatewayKeyKind.LINK:  # it has no public part
        return fingerprint(hmac.digest(key, b"fingerprint", "sha256"))
    return fingerprint(b64decode(_public(key).split()[1]))


# The stored form: 32 bytes for each key. The row is updated often, and must stay small (`db.readiness`).


def _encrypted(row: ControlPlane, kind: GatewayKeyKind) -> bytes | None:
    found: bytes | None = getattr(row, _COLUMNS[kind].key)
    return found


def _store(row: ControlPlane, encryptor: Encryptor, kind: GatewayKeyKind, keys: Sequence[bytes]) -> None:
    setattr(row, _COLUMNS[kind].key, encryptor.encrypt(b"".join(keys)))


def _record(
    session: Session, access: Access, kind: GatewayKeyKind, before: Sequence[bytes], after: Sequence[bytes]
) -> None:
    old, new = ({f"{kind}_keys": [_fingerprint(key, kind) for key in keys]} for keys in (before, after))
    audit_log.record(session, access, None, None, before=old, after=new)


def _keys(row: ControlPlane, encryptor: Encryptor, kind: GatewayKeyKind) -> list[bytes]:
    encrypted = _encrypted(row, kind)
    if encrypted is None:
        raise Unavailable(_NO_KEYS)
    joined = encryptor.decrypt(encrypted)
    return [joined[at : at + _KEY_BYTES] for at in range(0, len(joined), _KEY_BYTES)]


def _keys_now(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> list[bytes]:
    return _keys(_row(session), encryptor, kind)


def _locked(session: Session, encryptor: Encryptor, kind: GatewayKeyKind) -> tuple[ControlPlane, list[bytes]]:
    row = _row(session, is_locked=True)
    return row, _keys(row, encryptor, kind)


def _row(session: Session, *, is_locked: bool = False) -> ControlPlane:
    query = select(ControlPlane)
    row = session.scalars(query.with_for_update() if is_locked else query).one_or_none()
    if row is None:
        raise Unavailable(_NO_KEYS)
    return row
