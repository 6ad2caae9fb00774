"""What is read again and must not lie in the database in clear: encrypted with the operator's key (R16, R17).

Fernet (AES-128-CBC with HMAC-SHA256) of the `cryptography` package; several keys allow a rotation: the first
one encrypts, all of them decrypt.
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
    """The key given is not the one that this database was written with. The message is for the operator."""


class Encryptor:
    """Encrypts and decrypts short texts."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._newest = Fernet(keys[0])
        self._fernet = MultiFernet([Fernet(key) for key in keys])
        # The oldest: what was fingerprinted before a rotation is known again during it.
        self._fingerprint_key = keys[-1].encode()

    def seal(self, text: bytes) -> bytes:
        return self._fernet.encrypt(text)

    def open(self, sealed: bytes) -> bytes:
        """Raises InvalidToken for what was sealed with another key, or changed since."""
        return self._fernet.decrypt(sealed)

    def fingerprint(self, text: bytes) -> str:
        """A keyed hash (HMAC-SHA256): whoever has the database alone cannot try out what the text was."""
        return hmac.new(self._fingerprint_key, text, hashlib.sha256).hexdigest()

    def is_of_newest(self, sealed: bytes) -> bool:
        """Whether the first of the keys is all that is needed to open it."""
        try:
            self._newest.decrypt(sealed)
        except InvalidToken:
            return False
        return True

    def reseal(self, sealed: bytes) -> bytes:
        """The same text, sealed with the first of the keys. Raises InvalidToken, as `open`."""
        return self._fernet.rotate(sealed)


def keys_in(data_dir: Path, name: str = KEY_FILE) -> list[str]:
    """The keys of a file of the data directory; made at the first start, readable by its owner only."""
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


def check(session: Session, sealer: Encryptor) -> None:
    """At each start: is this the key that the database knows? With a new one in front, all is sealed anew.

    Raises:
        WrongEncryptionKey: it is another one.
    """
    row = session.scalars(select(ControlPlane)).one()
    if row.key_check is None:
        row.key_check = sealer.seal(_CHECK)
        return
    try:
        sealer.open(row.key_check)
        if not sealer.is_of_newest(row.key_check):
            row.key_check = sealer.reseal(row.key_check)
            _reseal_all(session, sealer)
    except InvalidToken:
        raise WrongEncryptionKey(
            "the encryption key is not the one this database was written with: secrets, registry passwords "
            "and stored answers could not be read. Put the old key into MOORING_ENCRYPTION_KEYS (after a "
            f"comma, behind the new one), or copy the old {KEY_FILE} into this server's data directory"
        ) from None


def _reseal_all(session: Session, sealer: Encryptor) -> None:
    for secret in session.scalars(select(Secret).with_for_update()):
        secret.sealed_value = sealer.reseal(secret.sealed_value)
    for registry in session.scalars(select(Registry).with_for_update()):
        registry.sealed_password = sealer.reseal(registry.sealed_password)
    stored = select(IdempotencyKey).where(IdempotencyKey.sealed, IdempotencyKey.body.is_not(None))
    for answer in session.scalars(stored.with_for_update()):
        answer.body = sealer.reseal(answer.body or b"")
