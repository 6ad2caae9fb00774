"""The public keys (JWKS) of an OpenID issuer: discovery, cache and refresh."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from jwt import PyJWK, PyJWTError
from pydantic_core import from_json

from mooring.settings import is_private_channel
from mooring_client.errors import SsoUnavailable, Unauthorized

log = logging.getLogger(__name__)

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# Asymmetric signatures only: with HS… anyone could sign with the public key, and "none" has no signature.
ALGORITHMS = frozenset({*_RSA, "ES256", "ES384", "ES512", "EdDSA"})

# While the issuer answers, a withdrawn key is rejected after this time at the latest.
_FRESH_S = 300.0
# How long the cached keys are used while the issuer is unreachable.
_USABLE_S = 24 * 3600.0
# The least time between two fetches for unknown keys, and after a failed fetch.
_RETRY_INTERVAL_S = 10.0
# How long a request with a known key waits for fresh keys.
_REFRESH_WAIT_S = 1.0
_MAX_BYTES = 256 * 1024
_MAX_KEYS = 100


@dataclass(frozen=True, slots=True)
class Key:
    """A public key and the algorithms that it may be used with."""

    id: str | None
    public: Any
    algorithms: frozenset[str]


class IssuerKeys:
    """The keys of one issuer. All requests that need fresh keys wait for the same fetch."""

    def __init__(
        self, issuer: str, *, clock: Callable[[], float] = time.monotonic, deadline_s: float = 5.0
    ) -> None:
        self._issuer = issuer
        self._deadline_s = deadline_s
        self._clock = clock
        self._tls = httpx.create_ssl_context()
        self._keys: Sequence[Key] = ()
        self._fetched_at: float | None = None
        self._next_try = float("-inf")
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, key_id: str | None, algorithm: str) -> Key:
        """The key that a token names; a token may omit the id if the issuer has one key for the algorithm.

        Raises:
            Unauthorized: the issuer has no such key.
            SsoUnavailable: the key is not cached, and the issuer does not answer.
        """
        known = self._find(key_id, algorithm)
        if known is not None and self._younger_than(_FRESH_S):
            return known
        await self._refresh(None if known is None else _REFRESH_WAIT_S)
        known = self._find(key_id, algorithm)
        if known is not None:
            return known
        if self._failed:
            raise SsoUnavailable("cannot reach the sign-on service; API keys still work")
        raise Unauthorized("invalid token: its issuer has no such key")

    def _find(self, key_id: str | None, algorithm: str) -> Key | None:
        if not self._younger_than(_USABLE_S):
            return None
        fitting = [key for key in self._keys if algorithm in key.algorithms and key_id in (None, key.id)]
        return fitting[0] if fitting and (key_id is not None or len(fitting) == 1) else None

    def _younger_than(self, age_s: float) -> bool:
        return self._fetched_at is not None and self._clock() - self._fetched_at < age_s

    async def _refresh(self, timeout_s: float | None) -> None:
        """Wait for the running fetch, or start one if the retry interval has passed."""
        if self._fetching is None and self._clock() >= self._next_try:
            self._fetching = asyncio.create_task(self._update())
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=timeout_s)

    async def _update(self) -> None:
        was_fresh = self._younger_than(_FRESH_S)
        try:
            async with asyncio.timeout(self._deadline_s):
                self._keys = await self._fetch()
        except Exception as error:
            # Whatever the error is, the cached keys stay in use.
            log.warning("cannot fetch the keys of %s: %s", self._issuer, str(error) or type(error).__name__)
            self._failed = True
        else:
            self._fetched_at = self._clock()
            self._failed = False
        finally:
            # Requests with invented key ids must not each cause a fetch.
            self._next_try = self._clock() + _RETRY_INTERVAL_S if was_fresh or self._failed else self._clock()
            self._fetching = None

    async def _fetch(self) -> Sequence[Key]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(verify=self._tls, timeout=self._deadline_s, headers=headers) as client:
            about = await _document(
                client, f"{self._issuer.removesuffix('/')}/.well-known/openid-configuration"
            )
            if about.get("issuer") != self._issuer:
                raise ValueError(
                    f"it names itself {about.get('issuer')!r}; set MOORING_OIDC_ISSUER to exactly that"
                )
            keys = keys_in(await _document(client, about["jwks_uri"]))
        if not keys:
            raise ValueError("it has no key for a signature algorithm that Mooring accepts")
        return keys


async def _document(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Fetch a small JSON object, without following redirects.

    Raises:
        ValueError: the answer is not such an object, or the URL is neither https nor on loopback.
        httpx.HTTPError, httpx.InvalidURL: the request failed.
    """
    if not is_private_channel(url):
        raise ValueError(f"{url} is neither https nor on loopback")
    body = b""
    async with client.stream("GET", url) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{url} answers {response.status_code}")
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise ValueError(f"{url} answers with more than {_MAX_BYTES} bytes")
    document = from_json(body)
    if not isinstance(document, dict):
        raise ValueError(f"{url} does not answer with a JSON object")  # noqa: TRY004 - bad input, no bug
    return document


def keys_in(document: dict[str, Any]) -> list[Key]:
    """The signature keys of a JWKS document; other keys are ignored.

    Raises:
        ValueError: the document is not a JWKS.
    """
    listed = document.get("keys")
    if not isinstance(listed, list):
        raise ValueError("its keys are not a list")  # noqa: TRY004 - bad input, no bug
    return [key for key in map(_key, listed[:_MAX_KEYS]) if key is not None]


def _key(jwk: Any) -> Key | None:
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig":
        return None
    try:
        parsed = PyJWK(jwk)
    except (PyJWTError, TypeError):
        return None
    fits_all_rsa = jwk.get("alg") is None and jwk.get("kty") == "RSA"
    algorithms = ALGORITHMS.intersection(_RSA if fits_all_rsa else {parsed.algorithm_name})
    return Key(jwk.get("kid"), parsed.key, algorithms) if algorithms else None
