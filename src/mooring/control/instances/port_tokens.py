"""Signed texts of the port proxy: the token in a link, and the cookie that it is exchanged for.

Both name a port of an instance and the credential that asked for the link. They can do no more than that
credential can do now, and end with it.
"""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy.orm import Session

from mooring.control import gateway_keys
from mooring.control.tenants.encryption import Encryptor
from mooring_client.schemas.spec import PortAuth

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
    """Signs with HMAC-SHA256 and the last key, and accepts signatures of all keys."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def sign(self, kind: TokenKind, token: PortToken) -> str:
        fields = [token.instance_id, token.port, token.holder, token.auth, token.expires_at, token.id]
        payload = json.dumps(fields, separators=(",", ":")).encode()
        return f"{_encoded(payload)}.{_encoded(_signature(self._keys[-1], kind, payload))}"

    def verify(self, kind: TokenKind, text: str, now_s: float) -> PortToken | None:
        """What the text allows; None: it is not signed by this service as this kind, or has expired."""
        payload, _, signature = text.partition(".")
        if len(text) > _MAX_LENGTH:
            return None
        try:
            signed, given = _decoded(payload), _decoded(signature)
        except ValueError:
            return None
        if not any(hmac.compare_digest(_signature(key, kind, signed), given) for key in self._keys):
            return None
        token = PortToken(*json.loads(signed))
        return token if now_s < token.expires_at else None


def _signature(key: bytes, kind: TokenKind, payload: bytes) -> bytes:
    return hmac.new(key, f"port {kind} ".encode() + payload, hashlib.sha256).digest()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    """Raises ValueError: it is not base64."""
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None


def signer(session: Session, encryptor: Encryptor) -> PortTokens:
    """Raises InvalidToken, Unavailable: as `gateway_keys.link_keys`."""
    return PortTokens(gateway_keys.link_keys(session, encryptor))
