"""Recognizes credentials of this service in requests: no program of a tenant may get one, valid or not."""

import re
from typing import Any, Final

import jwt
from cachetools import TTLCache
from starlette.concurrency import run_in_threadpool

from mooring.control.tenants import api_keys
from mooring.core import credentials
from mooring.db import failures
from mooring.db.session import Database

_BEARER: Final = re.compile(rb"bearer[ \t]+(\S+)[ \t]*", re.IGNORECASE)
_KEY_PREFIX: Final = "mk_"
# An operator's own key, which has no prefix, is made only when a server starts.
_CACHED_S: Final = 60.0
_MAX_CACHED: Final = 10_000


def bearer(authorization: bytes) -> str | None:
    """The secret of a header `Authorization: Bearer …`."""
    found = _BEARER.fullmatch(authorization)
    return found[1].decode("latin-1") if found else None


class OwnCredentials:
    """
    Args:
        issuer: of the tokens that people sign on with; None: there is no single sign-on.
    """

    def __init__(self, database: Database, issuer: str | None) -> None:
        self._database, self._issuer = database, issuer
        self._known: TTLCache[str, bool] = TTLCache(_MAX_CACHED, _CACHED_S)

    async def include(self, secret: str) -> bool:
        """Whether the secret is an API key or a sign-on token of this service, valid or not.

        Raises:
            Unavailable: the database does not answer.
        """
        if secret.startswith(_KEY_PREFIX) or self.is_sign_on(secret):
            return True
        hashed = credentials.hashed(secret)
        if (known := self._known.get(hashed)) is not None:
            return known
        with failures.as_unavailable():
            found = await run_in_threadpool(self._is_key, secret)
        self._known[hashed] = found
        return found

    def _is_key(self, secret: str) -> bool:
        with self._database.read() as session:
            return api_keys.exists(session, secret)

    def is_sign_on(self, secret: str) -> bool:
        """Whether it is a token of the issuer with which people sign on here."""
        if self._issuer is None or secret.count(".") != 2:
            return False
        try:
            claims: dict[str, Any] = jwt.decode(secret, options={"verify_signature": False})
        except jwt.PyJWTError:
            return False
        return claims.get("iss") == self._issuer
