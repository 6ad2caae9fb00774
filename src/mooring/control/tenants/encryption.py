"""Encryption of values that the service must read back, with the operator's key (R16, R17).

Fernet (AES-128-CBC with HMAC-SHA256) of the `cryptography` package. Several keys allow a rotation: the first
encrypts, all decrypt.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from mooring.db.tables import Base, ControlPlane, IdempotencyKey, Registry, Secret, Webhook

KEY_FILE = "encryption.key"
_CHECK = b"mooring"

# A row and its column.
_EncryptedValue = tuple[Base, InstrumentedAttribute[Any]]

log = logging.getLogger(__name__)


class WrongEncryptionKey(Exception):
    """The configured key is not this database's. The message is for the operator."""


class Encryptor:
    """Encrypts and decrypts short texts."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._newest = Fernet(keys[0])
        self._fernet = MultiFernet([Fernet(key) for key in keys])
        # The oldest key, so that fingerprints from before a rotation still match while both keys are set.
        self._fingerprint_key = keys[-1].encode()

    def encrypt(self, text: bytes) -> bytes:
        return self._fernet.encrypt(text)

    def decrypt(self, encrypted: bytes) -> bytes:
        """Raises InvalidToken: encrypted with another key, or modified."""
        return self._fernet.decrypt(encrypted)

    def fingerprint(self, text: bytes) -> str:
        """A keyed hash (HMAC-SHA256), so that the database alone does not allow guessing the text."""
        return hmac.new(self._fingerprint_key, text, hashlib.sha256).hexdigest()

    def uses_newest_key(self, encrypted: bytes) -> bool:
        """Whether the first key alone decrypts it."""
        try:
            self._newest.decrypt(encrypted)
        except InvalidToken:
            return False
        return True

    def reencrypt(self, encrypted: bytes) -> bytes:
        """The same text, encrypted with the first key. Raises InvalidToken, as `decrypt`."""
        return self._fernet.rotate(encrypted)


def keys_in(data_dir: Path, name: str = KEY_FILE) -> list[str]:
    """The keys in a file of the data directory. The first call creates it, readable by its owner only."""
    path = data_dir / name
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().split()
    with os.fdopen(descriptor, "wb") as file:
        file.write(Fernet.generate_key() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return path.read_text().split()


def check(session: Session, encryptor: Encryptor) -> None:
    """Check at startup that a key is the database's, and encrypt everything with the newest key.

    At each start, because other replicas may have encrypted with an older key since the last one.

    Raises:
        WrongEncryptionKey: no key is the database's; or this is the first start with a new key, and a value
            needs another key.
    """
    # Locked, and read again: the keys of gateways may be rotated just now.
    locked = select(ControlPlane).with_for_update().execution_options(populate_existing=True)
    row = session.scalars(locked).one()
    if row.key_check is None:
        row.key_check = encryptor.encrypt(_CHECK)
        return
    is_new = not encryptor.uses_newest_key(row.key_check)
    unreadable = sum(not _use_newest_key(encryptor, *each) for each in _encrypted_values(session, row))
    if not _use_newest_key(encryptor, row, ControlPlane.key_check) or (is_new and unreadable):
        raise WrongEncryptionKey(
            "the encryption key is not the one this database was written with: secrets, registry passwords "
            "and stored answers could not be read. Put the old key into MOORING_ENCRYPTION_KEYS (after a "
            f"comma, after the new one), or copy the old {KEY_FILE} into this server's data directory"
        )
    if unreadable:
        log.warning(
            "%d secrets, registry passwords, keys or stored answers need an older encryption key: put it "
            "into MOORING_ENCRYPTION_KEYS, after a comma, and restart",
            unreadable,
        )


def _encrypted_values(session: Session, row: ControlPlane) -> Iterator[_EncryptedValue]:
    for column in (
        ControlPlane.sealed_ssh_host_key, ControlPlane.sealed_ssh_ca_key, ControlPlane.sealed_port_key,
    ):  # fmt: skip
        yield row, column
    for secret in session.scalars(select(Secret).with_for_update()):
        yield secret, Secret.sealed_value
    for registry in session.scalars(select(Registry).with_for_update()):
        yield registry, Registry.sealed_password
    for webhook in session.scalars(select(Webhook).with_for_update()):
        yield webhook, Webhook.sealed_secret
        yield webhook, Webhook.sealed_former_secret
    stored = select(IdempotencyKey).where(IdempotencyKey.sealed, IdempotencyKey.body.is_not(None))
    for answer in session.scalars(stored.with_for_update()):
        yield answer, IdempotencyKey.body


def _use_newest_key(encryptor: Encryptor, row: Base, column: InstrumentedAttribute[Any]) -> bool:
    """Encrypt a value with the newest key. Returns False if no key can decrypt it."""
    encrypted: bytes | None = getattr(row, column.key)
    if encrypted is None or encryptor.uses_newest_key(encrypted):
        return True
    try:
        setattr(row, column.key, encryptor.reencrypt(encrypted))
    except InvalidToken:
        return False
    return True
