"""Which tokens are taken: those that the issuer made for this service, unchanged and of now."""

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
from tests.sso.asking import refused, status
from tests.sso.conftest import new_project
from tests.sso.provider import AUDIENCE, Provider, new_keys
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
def test_every_usual_algorithm_is_taken(service: RunningService, provider: Provider, algorithm: str) -> None:
    assert status(service, provider.token(alg=algorithm, claims=CLAIMS)) == 200


@pytest.mark.parametrize("kind", ["JWT", "application/at+jwt", "at+JWT"])
def test_every_name_of_an_access_token_is_taken(
    service: RunningService, provider: Provider, kind: str
) -> None:
    assert status(service, provider.token(header={"typ": kind}, claims=CLAIMS)) == 200


def test_a_service_may_be_one_of_several_audiences(service: RunningService, provider: Provider) -> None:
    payload = {"aud": ["https://other.test", AUDIENCE]}
    assert status(service, provider.token(payload=payload, claims=CLAIMS)) == 200


def test_a_token_ends_with_its_time_also_where_it_is_remembered(
    service: RunningService, provider: Provider
) -> None:
    token = provider.token(ttl_s=2, claims=CLAIMS)
    ends_at = jwt.decode(token, options={"verify_signature": False})["exp"]
    assert status(service, token) == 200

    def has_ended() -> bool:
        asked_at = time.time()
        taken = status(service, token) == 200
        assert not (taken and asked_at >= ends_at), "taken after its time"
        return not taken

    wait_until(has_ended)
    refused(service, token, "has expired")


def test_tokens_that_are_meant_for_others_are_refused(
    service: RunningService, provider: Provider, own_provider: Provider
) -> None:
    refused(service, provider.token(audience="https://other.test", claims=CLAIMS), "another service")
    refused(service, own_provider.token(claims=CLAIMS), "no such key")
    # Signed by the right key in another's name, as issuers with several tenants and one set of keys may do.
    refused(service, provider.token(payload={"iss": own_provider.issuer}, claims=CLAIMS), "another issuer")
    slashed = {"iss": f"{provider.issuer}/"}
    refused(service, provider.token(payload=slashed, claims=CLAIMS), "another issuer")


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
        ({"payload": {"cnf": {"jkt": "thumbprint"}}}, "no bearer token"),
        ({"payload": {"events": {"logout": {}}}}, "no bearer token"),
        ({"header": {"typ": "logout+jwt"}}, "no access token"),
        ({"header": {"typ": None}}, "no access token"),
    ],
    ids=str,
)
def test_what_even_the_issuer_says_must_be_an_access_token_of_now(
    service: RunningService, provider: Provider, wanted: dict[str, Any], why: str
) -> None:
    refused(service, provider.token(claims=CLAIMS, **wanted), why)


def test_a_token_says_by_whom_for_whom_of_whom_and_until_when(
    service: RunningService, provider: Provider
) -> None:
    token = provider.token(claims=CLAIMS)
    assert status(service, provider.signed(token)) == 200
    for claim in ("iss", "aud", "sub", "exp"):
        refused(service, provider.signed(token, payload={claim: None}), "lacks a claim")
    refused(service, provider.signed(token, header={"crit": ["x"], "x": 1}), "cannot be read")


def test_odd_claims_give_nothing_and_break_nothing(service: RunningService, provider: Provider) -> None:
    for roles in (None, 7, ["viewers"], {"here": {"viewers": 1}}, {"here": [["viewers"], 7, None]}):
        token = provider.token(claims={"roles": roles, "name": {"a": 1}, "email": [1], "email_verified": []})
        assert status(service, token) == 403
    assert status(service, provider.token(claims={"roles": {"here": "viewers"}})) == 200


def _encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def _decoded(part: str) -> dict[str, Any]:
    return dict(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))


def test_forged_tokens_are_refused(service: RunningService, provider: Provider) -> None:
    token = provider.token(alg="RS256", claims=CLAIMS)
    assert status(service, token) == 200
    header, payload, signature = token.split(".")
    head, claims = _decoded(header), _decoded(payload)

    other = _encoded({**claims, "sub": "root"})
    refused(service, f"{header}.{other}.{signature}", "cannot be verified")
    refused(service, f"{header}.{payload}.", "cannot be verified")
    refused(service, f"{header}.{payload}.{signature[:-4]}AAAA", "cannot be verified")
    for none in ("none", "None", "NONE"):
        refused(service, f"{_encoded({**head, 'alg': none})}.{payload}.", "algorithm")
    # With the public key, which everybody has, as a secret.
    public = jwt.PyJWK(provider.keys[1]).key.public_key()
    for secret in (
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    ):
        signing_input = f"{_encoded({**head, 'alg': 'HS256'})}.{payload}"
        hmac = jwt.get_algorithm_by_name("HS256").sign(signing_input.encode(), secret)
        made = base64.urlsafe_b64encode(hmac).rstrip(b"=").decode()
        refused(service, f"{signing_input}.{made}", "algorithm")
    # With a key of our own, under the name of the issuer's.
    (_, ours, _) = new_keys()
    for more in ({}, {"jwk": ours}, {"jku": "http://127.0.0.1:1/jwks"}):
        forged = jwt.encode(claims, jwt.PyJWK(ours).key, "RS256", headers={**head, **more})
        refused(service, forged, "cannot be verified")


@pytest.mark.parametrize(
    "header",
    [
        b"", b"x", b"7", b"[]", b"{}", b"\xff", b"[" * 9000, b'{"alg": ["ES256"]}', b'{"alg": "ES256K"}',
        b'{"alg": "ES256", "kid": 7}', b'{"alg": "ES256", "kid": "\\ud800"}', b'{"alg": "ES256", "typ": 7}',
    ],
    ids=lambda header: header[:40].decode("latin-1"),
)  # fmt: skip
def test_rubbish_that_looks_like_a_token_is_refused(service: RunningService, header: bytes) -> None:
    first = base64.urlsafe_b64encode(header).rstrip(b"=").decode()
    for token in (f"{first}.e30.c2ln", f"{first}.e30.", f"{first}..", f"{first}.e30.c2ln.x"):
        refused(service, token, "")


def test_an_operators_key_may_look_like_a_token(
    tmp_path: Path, sqlite_url: Callable[[], str], provider: Provider
) -> None:
    key = ".".join(("an-operators-key", "with-two-dots", "in-it"))
    settings = settings_for(
        sqlite_url(), tmp_path, oidc_issuer=provider.issuer, oidc_audience=AUDIENCE,
        bootstrap_admin_key=SecretStr(key),
    )  # fmt: skip
    with running(settings) as made:
        assert status(made, key) == 200
