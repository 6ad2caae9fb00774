"""The keys that sign the audit log (R32). They are not in the database, so its writers cannot forge rows.

Several keys allow a rotation: the first signs, all verify.
"""

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Protocol

from mooring_client.schemas.base import timestamp

KEY_FILE: Final = "audit.key"
# Prefix of a signature. Rows of older releases have a plain hash of 64 hexadecimal digits.
SIGNED: Final = "hmac:"

_SIGNED_FIELDS: Final = (
    "id", "at", "actor", "address", "request_id", "action", "project_id", "target_id", "before", "after",
)  # fmt: skip


class WrongAuditKey(Exception):
    """The configured key is not the one of this audit log. The message is for the operator."""


class Fields(Protocol):
    """A row of the audit log by column name."""

    def __getitem__(self, name: str, /) -> Any: ...


class SignatureStatus(Enum):
    """The result of verifying a signature."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN_KEY = "unknown key"


class AuditKeys:
    """Signs and verifies: `hmac:<key id>:<HMAC-SHA256, in hex>`."""

    def __init__(self, keys: Sequence[str]) -> None:
        secrets = [urlsafe_b64decode(key.strip()) for key in keys]
        # The id identifies the key without revealing it.
        self._by_id = {_digest(secret, "mooring audit key id")[:16]: secret for secret in secrets}
        self.ids = tuple(self._by_id)
        self._newest = self._by_id[self.ids[0]]

    @property
    def newest_id(self) -> str:
        return self.ids[0]

    def sign(self, text: str) -> str:
        return f"{SIGNED}{self.newest_id}:{_digest(self._newest, text)}"

    def verify(self, signature: str, text: str) -> SignatureStatus:
        key_id, _, digest = signature.removeprefix(SIGNED).partition(":")
        secret = self._by_id.get(key_id)
        if secret is None:
            return SignatureStatus.UNKNOWN_KEY if signature.startswith(SIGNED) else SignatureStatus.BAD
        matches = hmac.compare_digest(_digest(secret, text), digest)
        return SignatureStatus.GOOD if matches else SignatureStatus.BAD


def _digest(secret: bytes, text: str) -> str:
    return hmac.digest(secret, text.encode(), hashlib.sha256).hex()


# Each signed text starts with its kind, so that a signature of one kind is not valid for another.


def row_text(row: Fields) -> str:
    """What the signature of a row covers: its fields, as the API shows them."""
    return f"row\n{content(row)}"


def link_text(previous: str, chain: str, position: int, row_hash: str) -> str:
    """What the hash of a link covers: its position, the previous link, and the row's signature."""
    return f"link\n{previous}\n{chain}\n{position}\n{row_hash}"


def head_text(previous: str, number: int, links: int, digest: str) -> str:
    """What the hash of a head covers: the previous head and all links since."""
    return f"head\n{previous}\n{number}\n{links}\n{digest}"


def content(row: Fields) -> str:
    """The fields of a row as JSON with sorted keys and no spaces."""
    fields = {name: row[name] for name in _SIGNED_FIELDS}
    fields["at"] = timestamp(fields["at"])
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def unkeyed_hash(previous: str, row: Fields) -> str:
    """The hash of a row of an older release: SHA-256 over the previous hash and its fields."""
    return hashlib.sha256(f"{previous}\n{content(row)}".encode()).hexdigest()
