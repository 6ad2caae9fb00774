"""Validation of access tokens."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import SecretStr

from tests.service import RunningService, running, settings_for
from tests.sso.conftest import new_project
from tests.sso.provider import AUDIENCE, Provider, new_keys
from tests.sso.token_requests import require_unauthorized, status
from tests.testbed.waiting import wait_until

CLAIMS = {"roles": {"here": ["a", "viewers"]}}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, sqlite_url: Callable[[], str], provider: Provider
) -> Iterator[RunningService]:
    settings = settings_for(
        sqlite_url(), tmp_path_factory.mktemp("data"),
        oidc_issuer=provider.issuer, oidc_audience=AUDIENCE, oidc_roles="viewers=vision:viewer",
        oidc_roles_claim="roles.here", rate_limits="off",
    )  # fmt: skip
    with running(settings) as made:
        with made.client as admin:
            new_project(admin, "vision")
        yield made


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "PS256", "EdDSA"])
def test_every_supported_algorithm_is_accepted(
    service: RunningService, provider: Provider, algorithm: str
) -> None:
    assert status(service, provider.token(alg=algorithm, claims=CLAIMS)) == 200


@pytest.mark.parametrize("kind", ["JWT", "application/at+jwt", "at+JWT"])
def test_every_type_of_access_token_is_accepted(
    service: RunningService, provider: Provider, kind: str
) -> None:
    assert status(service, provider.token(header={"typ": kind}, claims=CLAIMS)) == 200


def test_a_service_may_be_one_of_several_audiences(service: RunningService, provider: Provider) -> None:
    payload = {"aud": ["https://other.test", AUDIENCE]}
    assert status(service, provider.token(payload=payload, claims=CLAIMS)) == 200


def test_a_cached_token_expires(service: RunningService, provider: Provider) -> None:
    token = provider.token(ttl_s=2, claims=CLAIMS)
    ends_at = jwt.decode(token, options={"verify_signature": False})["exp"]
    assert status(service, token) == 200

    def has_ended() -> bool:
        sent_at = time.time()
        accepted = status(service, token) == 200
        assert not (accepted and sent_at >= ends_at), "accepted after its expiry"
        return not accepted

    wait_until(has_ended)
    require_unauthorized(service, token, "has expired")


def test_tokens_for_other_services_or_of_other_issuers_are_rejected(
    service: RunningService, provider: Provider, own_provider: Provider
) -> None:
    require_unauthorized(
        service, provider.token(audience="https://other.test", claims=CLAIMS), "another service"
    )
    require_unauthorized(service, own_provider.token(claims=CLAIMS), "no such key")
    # Issuers with several tenants may sign tokens of all tenants with the same keys.
    require_unauthorized(
        service, provider.token(payload={"iss": own_provider.issuer}, claims=CLAIMS), "another issuer"
    )
    with_slash = {"iss": f"{provider.issuer}/"}
    require_unauthorized(service, provider.token(payload=with_slash, claims=CLAIMS), "another issuer")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"payload": {"sub": None}}, "lacks a claim"),
        ({"payload": {"sub": ""}}, "subject"),
        ({"payload": {"sub": "a\x00b"}}, "subject"),
        ({"payload": {"sub": "\ud800"}}, "subject"),
        ({"payload": {"sub": "x" * 256}}, "subject"),
        ({"payload": {"sub": ["ada"]}}, "cannot be verified"),
        ({"payload": {"exp": "soon"}}, "cannot be verified"),
        ({"payload": {"exp": 1}}, "expired"),
        ({"payload": {"nbf": 4e9}}, "not valid yet"),
        ({"payload": {"iat": 4e9}}, "not valid yet"),
        ({"payload": {"cnf": {"jkt": "thumbprint"}}}, "not a bearer token"),
        ({"payload": {"events": {"logout": {}}}}, "not a bearer token"),
        ({"header": {"typ": "logout+jwt"}}, "not an access token"),
        ({"header": {"typ": None}}, "not an access token"),
    ],
    ids=str,
)
def test_signed_tokens_with_invalid_claims_are_rejected(
    service: RunningService, provider: Provider, wanted: dict[str, Any], why: str
) -> None:
    require_unauthorized(service, provider.token(claims=CLAIMS, **wanted), why)


def test_a_token_needs_issuer_audience_subject_and_expiry(
    service: RunningService, provider: Provider
) -> None:
    token = provider.token(claims=CLAIMS)
    assert status(service, provider.signed_again(token)) == 200
    for claim in ("iss", "aud", "sub", "exp"):
        require_unauthorized(service, provider.signed_again(token, claims={claim: None}), "lacks a claim")


def test_a_token_with_an_unknown_critical_header_is_rejected(
    service: RunningService, provider: Provider
) -> None:
    token = provider.signed_again(provider.token(claims=CLAIMS), header={"crit": ["x"], "x": 1})
    require_unauthorized(service, token, "cannot be read")


def test_malformed_claims_are_ignored(service: RunningService, provider: Provider) -> None:
    for roles in (None, 7, ["viewers"], {"here": {"viewers": 1}}, {"here": [["viewers"], 7, None]}):
        token = provider.token(claims={"roles": roles, "name": {"a": 1}, "email": [1], "email_verified": []})
        assert status(service, token) == 403
    assert status(service, provider.token(claims={"roles": {"here": "viewers"}})) == 200


def _encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def _decoded(part: str) -> dict[str, Any]:
    return dict(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))


def test_forged_tokens_are_rejected(service: RunningService, provider: Provider) -> None:
    token = provider.token(alg="RS256", claims=CLAIMS)
    assert status(service, token) == 200
    header, payload, signature = token.split(".")
    head, claims = _decoded(header), _decoded(payload)

    other = _encoded({**claims, "sub": "root"})
    require_unauthorized(service, f"{header}.{other}.{signature}", "cannot be verified")
    require_unauthorized(service, f"{header}.{payload}.", "cannot be verified")
    require_unauthorized(service, f"{header}.{payload}.{signature[:-4]}AAAA", "cannot be verified")
    for none in ("none", "None", "NONE"):
        require_unauthorized(service, f"{_encoded({**head, 'alg': none})}.{payload}.", "algorithm")
    # HMAC with the public key as the secret.
    public = jwt.PyJWK(provider.keys[1]).key.public_key()
    for secret in (
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    ):
        signing_input = f"{_encoded({**head, 'alg': 'HS256'})}.{payload}"
        hmac = jwt.get_algorithm_by_name("HS256").sign(signing_input.encode(), secret)
        made = base64.urlsafe_b64encode(hmac).rstrip(b"=").decode()
        require_unauthorized(service, f"{signing_input}.{made}", "algorithm")
    # Signed with another key, but with the ID of the issuer's key.
    _elliptic, attacker_key, _edwards = new_keys()
    for more in ({}, {"jwk": attacker_key}, {"jku": "http://127.0.0.1:1/jwks"}):
        forged = jwt.encode(claims, jwt.PyJWK(attacker_key).key, "RS256", headers={**head, **more})
        require_unauthorized(service, forged, "cannot be verified")


@pytest.mark.parametrize(
    "header",
    [
        b"", b"x", b"7", b"[]", b"{}", b"\xff", b"[" * 9000, b'{"alg": ["ES256"]}', b'{"alg": "ES256K"}',
        b'{"alg": "ES256", "kid": 7}', b'{"alg": "ES256", "kid": "\\ud800"}', b'{"alg": "ES256", "typ": 7}',
    ],
    ids=lambda header: header[:40].decode("latin-1"),
)  # fmt: skip
def test_malformed_tokens_are_rejected(service: RunningService, header: bytes) -> None:
    first = base64.urlsafe_b64encode(header).rstrip(b"=").decode()
    for token in (f"{first}.e30.c2ln", f"{first}.e30.", f"{first}..", f"{first}.e30.c2ln.x"):
        require_unauthorized(service, token, "")


def test_an_api_key_may_look_like_a_token(
    tmp_path: Path, sqlite_url: Callable[[], str], provider: Provider
) -> None:
    key = ".".join(("an-operators-key", "with-two-dots", "in-it"))
    settings = settings_for(
        sqlite_url(), tmp_path, oidc_issuer=provider.issuer, oidc_audience=AUDIENCE,
        bootstrap_admin_key=SecretStr(key),
    )  # fmt: skip
    with running(settings) as made:
        assert status(made, key) == 200
