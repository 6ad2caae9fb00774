"""Single sign-on: verifies bearer tokens (JWT) of an OpenID issuer, without a request for each token."""

import re
from collections.abc import Mapping
from typing import Any, Final

import jwt

from mooring.auth.jwks import ALGORITHMS, IssuerKeys
from mooring.core import sign_on
from mooring.core.sign_on import Person
from mooring.db.types import now
from mooring.settings import Settings
from mooring_client.errors import Unauthorized
from mooring_client.schemas.text import printable

_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_MAX_LENGTH = 16 * 1024
# Allowed clock difference for tokens that are not valid yet. Expired tokens get none.
_LEEWAY_S = 30
# Values of `typ` of access tokens. Other tokens of an issuer (logout, DPoP proofs, …) have other values.
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_MAX_SUBJECT = 255
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_MAX_EMAIL = 254
_REASONS: Final[Mapping[type[jwt.PyJWTError], str]] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidAudienceError: "it is for another service",
    jwt.InvalidIssuerError: "it is from another issuer",
    jwt.MissingRequiredClaimError: "it lacks a claim: iss, aud, sub or exp",
}


class SignOn:
    """Verifies tokens of one issuer for one audience."""

    def __init__(self, settings: Settings, keys: IssuerKeys) -> None:
        self._settings = settings
        self._keys = keys

    async def person(self, token: str) -> Person:
        """The person that a token identifies.

        Raises:
            Unauthorized: the token is not valid; the message says why.
            SsoUnavailable: cannot reach the issuer, whose keys are needed.
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
            raise _invalid(_REASONS.get(type(error), "it cannot be verified")) from None
        return self._person(claims)

    def _person(self, claims: Mapping[str, Any]) -> Person:
        expires_at = int(claims["exp"])
        if expires_at <= now().timestamp():
            raise _invalid(_REASONS[jwt.ExpiredSignatureError])
        if "cnf" in claims or "events" in claims:
            # `cnf`: the client must prove that it has a key. `events`: a message, such as a logout.
            raise _invalid("it is not a bearer token")
        subject = claims["sub"]
        if not 0 < len(subject) <= _MAX_SUBJECT or not subject.isprintable():
            raise _invalid("its subject cannot be stored")
        values = _texts(_claim(claims, self._settings.oidc_roles_claim))
        return Person(
            issuer=claims["iss"],
            subject=subject,
            name=_name(_claim(claims, self._settings.oidc_name_claim)),
            email=_email(claims, self._settings.oidc_email_claim),
            grants=sign_on.granted_by(values, self._settings.oidc_roles),
            expires_at=expires_at,
        )


def from_settings(settings: Settings) -> SignOn | None:
    """The verifier, or None if no issuer is configured."""
    return SignOn(settings, IssuerKeys(settings.oidc_issuer)) if settings.oidc_issuer else None


def looks_like_token(secret: str) -> bool:
    return len(secret) <= _MAX_LENGTH and _JWT.fullmatch(secret) is not None


def _header(token: str) -> Mapping[str, Any]:
    """The unverified header, used only to choose the key."""
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise _invalid("it cannot be read") from None
    algorithm, kind = header.get("alg"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise _invalid("it is not signed with an accepted algorithm")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise _invalid("it is not an access token")
    return header


def _invalid(why: str) -> Unauthorized:
    return Unauthorized(f"invalid token: {why}")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name or, if there is none, by its path: `realm_access.roles`. Names may contain dots."""
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
    """The address by which owners find the person; null if the issuer marks it as not verified."""
    value = _claim(claims, name)
    if claims.get("email_verified", True) not in (True, "true") or not isinstance(value, str):
        return None
    usable = len(value) <= _MAX_EMAIL and value.isprintable() and _EMAIL.fullmatch(value)
    return value if usable else None
