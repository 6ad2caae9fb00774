"""Signed texts of the port proxy: the token in a link, and the cookie that it is exchanged for.

Both name a port of an instance and the credential that asked for the link. They can do no more than that
credential can do now, and end with it.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from enum import StrEnum
from secrets import token_bytes
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.tenants.encryption import Encryptor
from mooring.core.instance.spec import PortAuth
from mooring.db.tables import ControlPlane

_MAX_LENGTH: Final = 1024


class TokenKind(StrEnum):
    LINK = "link"
    COOKIE = "cookie"


@dataclass(frozen=True, slots=True)
class PortToken:
    """What a link or cookie allows.

    Attributes:
        holder: as `ssh_holders.Holder.text`.
        auth: of the port when the link was made; a port with another one does not accept it.
        expires_at: seconds since the epoch.
        id: of the row of a link that works once; empty: it works until it expires.
    """

    instance_id: str
    port: int
    holder: str
    auth: PortAuth
    expires_at: int
    id: str = ""


class PortTokens:
    """Signs and verifies with HMAC-SHA256."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, kind: TokenKind, token: PortToken) -> str:
        fields = [token.instance_id, token.port, token.holder, token.auth, token.expires_at, token.id]
        payload = json.dumps(fields, separators=(",", ":")).encode()
        return f"{_encoded(payload)}.{_encoded(self._signature(kind, payload))}"

    def verify(self, kind: TokenKind, text: str, now_s: float) -> PortToken | None:
        """What the text allows; None: it is not signed by this service as this kind, or has expired."""
        payload, _, signature = text.partition(".")
        if len(text) > _MAX_LENGTH:
            return None
        try:
            signed, given = _decoded(payload), _decoded(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(self._signature(kind, signed), given):
            return None
        token = PortToken(*json.loads(signed))
        return token if now_s < token.expires_at else None

    def _signature(self, kind: TokenKind, payload: bytes) -> bytes:
        return hmac.new(self._key, f"port {kind} ".encode() + payload, hashlib.sha256).digest()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    """Raises ValueError: it is not base64."""
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None


def ensure_key(session: Session, encryptor: Encryptor) -> None:
    """Create the key at the first start."""
    row = session.scalars(select(ControlPlane)).one()
    row.sealed_port_key = row.sealed_port_key or encryptor.encrypt(token_bytes(32))


def signer(session: Session, encryptor: Encryptor) -> PortTokens:
    """Raises InvalidToken: the key was encrypted with another encryption key."""
    encrypted = session.scalars(select(ControlPlane.sealed_port_key)).one()
    assert encrypted is not None  # see `ensure_key`
    return PortTokens(encryptor.decrypt(encrypted))
