"""The public keys of an OpenID issuer: found by discovery, kept, read again when they may have changed."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from jwt import PyJWK, PyJWTError
from pydantic_core import from_json

from mooring.core.errors import Unauthorized, Unavailable
from mooring.settings import is_private_channel

log = logging.getLogger(__name__)

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# Signatures by a private key only: what a public key can make (HS…) or nobody (none) proves nothing.
ALGORITHMS = frozenset({*_RSA, "ES256", "ES384", "ES512", "EdDSA"})

# A key that the issuer has withdrawn is refused after this time at the latest, while the issuer answers.
_FRESH_S = 300.0
# For so long they serve while the issuer is away.
_USABLE_S = 24 * 3600.0
# Between two looks for a key that was not there, and after a failure.
_PAUSE_S = 10.0
# How long a request with a known key waits for a newer set.
_PATIENCE_S = 1.0
_LARGEST_BYTES = 256 * 1024
_MOST_KEYS = 100


@dataclass(frozen=True, slots=True)
class Key:
    """One public key, and the algorithms it may be used with here."""

    id: str | None
    public: Any
    algorithms: frozenset[str]


class IssuerKeys:
    """One issuer's keys. All requests that need them read anew wait for one reading."""

    def __init__(
        self, issuer: str, *, clock: Callable[[], float] = time.monotonic, deadline_s: float = 5.0
    ) -> None:
        self._issuer = issuer
        self._deadline_s = deadline_s
        self._clock = clock
        self._tls = httpx.create_ssl_context()
        self._keys: Sequence[Key] = ()
        self._read_at: float | None = None
        self._next_try = float("-inf")
        self._failed = False
        self._reading: asyncio.Task[None] | None = None

    async def key(self, key_id: str | None, algorithm: str) -> Key:
        """The key that a token says it is signed with; a token may leave that out where there is only one.

        Raises:
            Unauthorized: the issuer has no such key.
            Unavailable: code `sso_unavailable`: it may have one, and does not answer.
        """
        known = self._find(key_id, algorithm)
        if known is not None and self._younger_than(_FRESH_S):
            return known
        await self._read_again(None if known is None else _PATIENCE_S)
        known = self._find(key_id, algorithm)
        if known is not None:
            return known
        if self._failed:
            raise Unavailable(
                "the sign-on service does not answer just now; API keys work", code="sso_unavailable"
            )
        raise Unauthorized("the token is refused: its issuer has no such key")

    def _find(self, key_id: str | None, algorithm: str) -> Key | None:
        if not self._younger_than(_USABLE_S):
            return None
        fitting = [key for key in self._keys if algorithm in key.algorithms and key_id in (None, key.id)]
        return fitting[0] if fitting and (key_id is not None or len(fitting) == 1) else None

    def _younger_than(self, age_s: float) -> bool:
        return self._read_at is not None and self._clock() - self._read_at < age_s

    async def _read_again(self, patience_s: float | None) -> None:
        """Wait for a reading, if there is one or one may begin."""
        if self._reading is None and self._clock() >= self._next_try:
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=patience_s)

    async def _read(self) -> None:
        was_fresh = self._younger_than(_FRESH_S)
        try:
            async with asyncio.timeout(self._deadline_s):
                self._keys = await self._fetch()
        except Exception as error:
            # Whatever is wrong over there, the keys already known go on serving.
            log.warning("the keys of %s cannot be read: %s", self._issuer, error or type(error).__name__)
            self._failed = True
        else:
            self._read_at = self._clock()
            self._failed = False
        finally:
            # A made-up key must not make every request ask the issuer.
            self._next_try = self._clock() + _PAUSE_S if was_fresh or self._failed else self._clock()
            self._reading = None

    async def _fetch(self) -> Sequence[Key]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(verify=self._tls, timeout=self._deadline_s, headers=headers) as client:
            about = await _document(
                client, f"{self._issuer.removesuffix('/')}/.well-known/openid-configuration"
            )
            if about.get("issuer") != self._issuer:
                raise ValueError(
                    f"it calls itself {about.get('issuer')!r}: MOORING_OIDC_ISSUER must be the same"
                )
            keys = keys_in(await _document(client, about["jwks_uri"]))
        if not keys:
            raise ValueError("none of its keys is for signatures that are taken here")
        return keys


async def _document(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A small JSON object; redirects are not followed.

    Raises:
        ValueError: it is something else.
        httpx.HTTPError, httpx.InvalidURL: it cannot be had.
    """
    if not is_private_channel(url):
        raise ValueError(f"{url} is neither https nor on loopback")
    body = b""
    async with client.stream("GET", url) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{url} answers {response.status_code}")
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _LARGEST_BYTES:
                raise ValueError(f"{url} answers with more than {_LARGEST_BYTES} bytes")
    document = from_json(body)
    if not isinstance(document, dict):
        raise ValueError(f"{url} answers with no JSON object")  # noqa: TRY004 - the issuer's, not ours
    return document


def keys_in(document: dict[str, Any]) -> list[Key]:
    """The keys of a JWKS document that are for signatures; others are passed over.

    Raises:
        ValueError: it is no JWKS.
    """
    listed = document.get("keys")
    if not isinstance(listed, list):
        raise ValueError("its keys are no list")  # noqa: TRY004 - the issuer's, not ours
    return [key for key in map(_key, listed[:_MOST_KEYS]) if key is not None]


def _key(jwk: Any) -> Key | None:
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig":
        return None
    try:
        made = PyJWK(jwk)
    except (PyJWTError, TypeError):
        return None
    stated = jwk.get("alg") is not None or jwk.get("kty") != "RSA"
    algorithms = ALGORITHMS.intersection({made.algorithm_name} if stated else _RSA)
    return Key(jwk.get("kid"), made.key, algorithms) if algorithms else None
