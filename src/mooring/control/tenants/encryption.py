"""Encryption of values that the service must read back, with the operator's key (R16, R17).

Fernet (AES-128-CBC with HMAC-SHA256) of the `cryptography` package. Several keys allow a rotation: the first
encrypts, all decrypt.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.db.tables import ControlPlane, IdempotencyKey, Registry, Secret

KEY_FILE = "encryption.key"
_CHECK = b"mooring"


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
    """Check at startup that a key is the database's. If a new key comes first, encrypt everything with that.

    Raises:
        WrongEncryptionKey: no key is the database's, or one of the values needs another key.
    """
    # Locked, and read again: the keys of gateways may be rotated just now.
    locked = select(ControlPlane).with_for_update().execution_options(populate_existing=True)
    row = session.scalars(locked).one()
    if row.key_check is None:
        row.key_check = encryptor.encrypt(_CHECK)
        return
    try:
        encryptor.decrypt(row.key_check)
        if not encryptor.uses_newest_key(row.key_check):
            row.key_check = encryptor.reencrypt(row.key_check)
            _reencrypt_all(session, encryptor, row)
    except InvalidToken:
        raise WrongEncryptionKey(
            "the encryption key is not the one this database was written with: secrets, registry passwords "
            "and stored answers could not be read. Put the old key into MOORING_ENCRYPTION_KEYS (after a "
            f"comma, after the new one), or copy the old {KEY_FILE} into this server's data directory"
        ) from None


def _reencrypt_all(session: Session, encryptor: Encryptor, row: ControlPlane) -> None:
    if row.sealed_ssh_host_key is not None:
        row.sealed_ssh_host_key = encryptor.reencrypt(row.sealed_ssh_host_key)
    if row.sealed_ssh_ca_key is not None:
        row.sealed_ssh_ca_key = encryptor.reencrypt(row.sealed_ssh_ca_key)
    if row.sealed_port_key is not None:
        row.sealed_port_key = encryptor.reencrypt(row.sealed_port_key)
    for secret in session.scalars(select(Secret).with_for_update()):
        secret.sealed_value = encryptor.reencrypt(secret.sealed_value)
    for registry in session.scalars(select(Registry).with_for_update()):
        registry.sealed_password = encryptor.reencrypt(registry.sealed_password)
    stored = select(IdempotencyKey).where(IdempotencyKey.sealed, IdempotencyKey.body.is_not(None))
    for answer in session.scalars(stored.with_for_update()):
        answer.body = encryptor.reencrypt(answer.body or b"")
