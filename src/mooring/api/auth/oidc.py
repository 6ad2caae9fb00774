"""Single sign-on: bearer tokens (JWT) of the organisation's OpenID issuer, checked without asking it."""

import re
import time
from collections.abc import Mapping
from typing import Any, Final

import jwt

from mooring.api.auth.jwks import ALGORITHMS, IssuerKeys
from mooring.core import sign_on
from mooring.core.errors import Unauthorized
from mooring.core.sign_on import Person
from mooring.core.text import printable
from mooring.settings import Settings

_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_LONGEST = 16 * 1024
# For clocks that differ: of tokens that are not valid yet. None for those that no longer are.
_LEEWAY_S = 30
# Tokens of other kinds by the same issuer (logout, DPoP proofs, …) say so here.
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_LONGEST_SUBJECT = 255
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_LONGEST_EMAIL = 254
_WHY: Final[Mapping[type[jwt.PyJWTError], str]] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidAudienceError: "it is meant for another service",
    jwt.InvalidIssuerError: "it is of another issuer",
    jwt.MissingRequiredClaimError: "it lacks a claim of iss, aud, sub and exp",
}


class SignOn:
    """Verifies tokens of one issuer for one audience."""

    def __init__(self, settings: Settings, keys: IssuerKeys) -> None:
        self._settings = settings
        self._keys = keys

    async def person(self, token: str) -> Person:
        """Whom a token stands for.

        Raises:
            Unauthorized: nobody here; the message says why.
            Unavailable: code `sso_unavailable`: the issuer must be asked for its keys, and does not answer.
        """
        header = _header(token)
        key = await self._keys.key(header.get("kid"), header["alg"])
        try:
            claims = jwt.decode(
                token,
                key.public,
                algorithms=sorted(key.algorithms),
                audience=self._settings.oidc_audience,
                issuer=self._settings.oidc_issuer,
                leeway=_LEEWAY_S,
                options={"require": ["iss", "aud", "sub", "exp"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise _refused(_WHY.get(type(error), "it cannot be verified")) from None
        return self._person(claims)

    def _person(self, claims: Mapping[str, Any]) -> Person:
        expires_at = int(claims["exp"])
        if expires_at <= time.time():
            raise _refused(_WHY[jwt.ExpiredSignatureError])
        if "cnf" in claims or "events" in claims:
            # Bound to a key that its sender must prove to have, or a message about a session.
            raise _refused("it is no bearer token")
        subject = claims["sub"]
        if not 0 < len(subject) <= _LONGEST_SUBJECT or not subject.isprintable():
            raise _refused("its subject cannot be stored")
        values = _texts(_claim(claims, self._settings.oidc_roles_claim))
        return Person(
            issuer=claims["iss"],
            subject=subject,
            name=_name(_claim(claims, self._settings.oidc_name_claim)),
            email=_email(claims, self._settings.oidc_email_claim),
            grants=sign_on.given(self._settings.oidc_roles, values),
            expires_at=expires_at,
        )


def from_settings(settings: Settings) -> SignOn | None:
    """Null: no issuer is set."""
    return SignOn(settings, IssuerKeys(settings.oidc_issuer)) if settings.oidc_issuer else None


def looks_like_token(secret: str) -> bool:
    return len(secret) <= _LONGEST and _JWT.fullmatch(secret) is not None


def _header(token: str) -> Mapping[str, Any]:
    """The header, which nobody has vouched for yet: it only says which key to look at."""
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise _refused("it cannot be read") from None
    algorithm, kind = header.get("alg"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise _refused("it is not signed with an algorithm that is taken here")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise _refused("it is no access token")
    return header


def _refused(why: str) -> Unauthorized:
    return Unauthorized(f"the token is refused: {why}")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or by its path: `realm_access.roles`. Names may hold dots, so these come first."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _name(value: Any) -> str | None:
    return (printable(value).strip() or None) if isinstance(value, str) else None


def _email(claims: Mapping[str, Any], name: str) -> str | None:
    """An address that owners can find the person by; not one that the issuer itself does not vouch for."""
    value = _claim(claims, name)
    if claims.get("email_verified", True) not in (True, "true") or not isinstance(value, str):
        return None
    usable = len(value) <= _LONGEST_EMAIL and value.isprintable() and _EMAIL.fullmatch(value)
    return value if usable else None
