"""The issuer's keys: rotation, caching and outages of the issuer."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest

from mooring.auth.jwks import IssuerKeys, keys_in
from mooring_client.errors import SsoUnavailable, Unauthorized
from tests.problems import problem
from tests.service import RunningService, running, settings_for
from tests.sso.provider import AUDIENCE, Provider, new_keys
from tests.sso.token_requests import get_with_token, status
from tests.testbed.waiting import wait_until

CLAIMS = {"groups": ["admins"]}


@pytest.fixture
def new_service(tmp_path: Path, sqlite_url: Callable[[], str]) -> Callable[[str], Any]:
    @contextmanager
    def new(issuer: str) -> Iterator[RunningService]:
        settings = settings_for(
            sqlite_url(), tmp_path, oidc_issuer=issuer, oidc_audience=AUDIENCE, oidc_roles="admins=admin",
            rate_limits="off",
        )  # fmt: skip
        with running(settings) as made:
            yield made

    return new


def tokens_with_unknown_keys(*, count: int = 1) -> list[str]:
    """Tokens with key IDs that the issuer does not have."""
    key = jwt.PyJWK(new_keys()[0]).key
    return [jwt.encode({}, key, "ES256", headers={"kid": f"made-up-{number}"}) for number in range(count)]


def test_rotated_keys_of_the_issuer_are_found(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        assert status(service, own_provider.token(claims=CLAIMS)) == 200
        own_provider.rotate()
        assert status(service, own_provider.token(claims=CLAIMS)) == 200


def test_tokens_with_unknown_keys_cause_few_requests_to_the_issuer(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        for _ in range(3):
            assert status(service, own_provider.token(claims=CLAIMS)) == 200
        assert own_provider.served("/jwks") == 1
        assert {status(service, token) for token in tokens_with_unknown_keys(count=20)} == {401}
        assert own_provider.served("/jwks") == 2
        assert own_provider.served("/.well-known/openid-configuration") == 2


def test_known_keys_are_used_while_the_issuer_is_unreachable(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        token, later = (own_provider.token(claims=CLAIMS) for _ in range(2))
        assert status(service, token) == 200
        own_provider.stop()
        assert status(service, later) == 200
        answer = get_with_token(service, *tokens_with_unknown_keys())
        assert problem(answer, 503, "sso_unavailable")["retryable"]
        assert int(answer.headers["retry-after"]) > 0
        assert status(service, token) == status(service, later) == 200


def test_an_issuer_that_was_never_reachable_is_503(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    token = own_provider.token(claims=CLAIMS)
    own_provider.stop()
    with new_service(own_provider.issuer) as service:
        problem(get_with_token(service, token), 503, "sso_unavailable")
        with service.client as admin:
            assert admin.get("/v1/me").status_code == 200  # API keys do not depend on the issuer


def test_an_issuer_with_another_name_is_rejected(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    token = own_provider.token(claims=CLAIMS)
    alias = own_provider.issuer.replace("127.0.0.1", "localhost")
    for issuer in (alias, f"{own_provider.issuer}/"):
        with new_service(issuer) as service:
            problem(get_with_token(service, token), 503, "sso_unavailable")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_withdrawn_key_expires_unless_the_issuer_is_unreachable(
    own_provider: Provider,
) -> None:
    old = own_provider.keys[0]["kid"]

    async def run() -> None:
        clock = Clock()
        keys = IssuerKeys(own_provider.issuer, clock=clock)
        assert (await keys.key(old, "ES256")).id == old
        own_provider.rotate()
        clock.now = 299
        assert (await keys.key(old, "ES256")).id == old
        clock.now = 301
        with pytest.raises(Unauthorized):
            await keys.key(old, "ES256")

        new = own_provider.keys[0]["kid"]
        own_provider.stop()
        for clock.now in (302, 700, 24 * 3600 - 1):
            assert (await keys.key(new, "ES256")).id == new
        clock.now = 24 * 3600 + 302
        with pytest.raises(SsoUnavailable):
            await keys.key(new, "ES256")
        own_provider.start()
        with pytest.raises(SsoUnavailable):  # the last attempt was too recent
            await keys.key(new, "ES256")
        clock.now += 10
        assert (await keys.key(new, "ES256")).id == new

    asyncio.run(run())


def test_an_unresponsive_issuer_does_not_delay_tokens_with_known_keys(
    own_provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    known = own_provider.keys[0]["kid"]

    async def run() -> None:
        clock = Clock()
        keys = IssuerKeys(own_provider.issuer, clock=clock, deadline_s=3)
        await keys.key(known, "ES256")
        own_provider.freeze()
        try:
            clock.now = 301
            async with asyncio.timeout(2.5):
                assert (await keys.key(known, "ES256")).id == known
            waiting = [asyncio.create_task(keys.key("unknown", "ES256")) for _ in range(5)]
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {SsoUnavailable}
        finally:
            own_provider.thaw()
        clock.now = 320
        assert (await keys.key(known, "ES256")).id == known
        # One fetch at first, one for all requests to the frozen issuer, and one after it.
        wait_until(lambda: own_provider.served("/.well-known/openid-configuration") == 3)

    asyncio.run(run())
    assert "Timeout" in caplog.text


def test_a_key_is_used_only_for_its_algorithms() -> None:
    elliptic, rsa, edwards = ({**key, "kid": name} for key, name in zip(new_keys(), "abc", strict=True))
    secret = {"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).decode(), "kid": "d"}
    listed = [
        elliptic, rsa, {**rsa, "alg": "PS256", "kid": "e"}, edwards, secret, {**secret, "alg": "RS256"},
        {**rsa, "use": "enc"}, {**rsa, "alg": "RSA-OAEP"}, {**rsa, "alg": "HS256"}, {**rsa, "n": 7},
        {**elliptic, "crv": "P-384"}, {**elliptic, "crv": "secp256k1"}, {}, {"kty": []}, 7, None,
        {**rsa, "alg": ["RS256"]}, {**rsa, "use": []},
    ]  # fmt: skip
    assert {key.id: sorted(key.algorithms) for key in keys_in(json.loads(json.dumps({"keys": listed})))} == {
        "a": ["ES256"],
        "b": ["PS256", "PS384", "PS512", "RS256", "RS384", "RS512"],
        "c": ["EdDSA"],
        "e": ["PS256"],
    }


def test_a_token_without_a_key_id_is_accepted_only_if_one_key_fits(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    nameless = own_provider.signed_again(own_provider.token(claims=CLAIMS), header={"kid": None})
    assert "kid" not in jwt.get_unverified_header(nameless)
    with new_service(own_provider.issuer) as service:
        assert status(service, nameless) == 200
    own_provider.stop()
    own_provider.keys += new_keys()
    own_provider.start()
    with new_service(own_provider.issuer) as service:
        assert status(service, own_provider.token(claims=CLAIMS)) == 200
        assert status(service, nameless) == 401
