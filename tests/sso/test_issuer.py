"""The issuer's keys: rotated, asked for seldom, and enough while the issuer is away."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest

from mooring.api.auth.jwks import IssuerKeys, keys_in
from mooring.core.errors import Unauthorized, Unavailable
from tests.problems import problem
from tests.service import RunningService, running, settings_for
from tests.sso.asking import ask, status
from tests.sso.provider import AUDIENCE, Provider, new_keys
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


def made_up(*, many: int = 1) -> list[str]:
    """Tokens that name keys of which nobody has heard."""
    key = jwt.PyJWK(new_keys()[0]).key
    return [jwt.encode({}, key, "ES256", headers={"kid": f"made-up-{number}"}) for number in range(many)]


def test_keys_that_the_issuer_changes_are_found(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        assert status(service, own_provider.token(claims=CLAIMS)) == 200
        own_provider.rotate()
        assert status(service, own_provider.token(claims=CLAIMS)) == 200


def test_made_up_keys_do_not_make_the_issuer_busy(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        for _ in range(3):
            assert status(service, own_provider.token(claims=CLAIMS)) == 200
        assert own_provider.served("/jwks") == 1
        assert {status(service, token) for token in made_up(many=20)} == {401}
        assert own_provider.served("/jwks") == 2
        assert own_provider.served("/.well-known/openid-configuration") == 2


def test_while_the_issuer_is_away_its_known_keys_serve(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    with new_service(own_provider.issuer) as service:
        token, later = (own_provider.token(claims=CLAIMS) for _ in range(2))
        assert status(service, token) == 200
        own_provider.stop()
        assert status(service, later) == 200
        answer = ask(service, *made_up())
        assert problem(answer, 503, "sso_unavailable")["retryable"]
        assert int(answer.headers["retry-after"]) > 0
        assert status(service, token) == status(service, later) == 200


def test_an_issuer_that_was_never_there_is_no_fault_of_the_token(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    token = own_provider.token(claims=CLAIMS)
    own_provider.stop()
    with new_service(own_provider.issuer) as service:
        problem(ask(service, token), 503, "sso_unavailable")
        with service.client as admin:
            assert admin.get("/v1/me").status_code == 200  # keys know nothing of all this


def test_an_issuer_of_another_name_is_not_believed(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    token = own_provider.token(claims=CLAIMS)
    alias = own_provider.issuer.replace("127.0.0.1", "localhost")
    for issuer in (alias, f"{own_provider.issuer}/"):
        with new_service(issuer) as service:
            problem(ask(service, token), 503, "sso_unavailable")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_withdrawn_key_is_good_for_minutes_and_longer_only_while_the_issuer_is_away(
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
        with pytest.raises(Unavailable):
            await keys.key(new, "ES256")
        own_provider.start()
        with pytest.raises(Unavailable):  # it was asked just now
            await keys.key(new, "ES256")
        clock.now += 10
        assert (await keys.key(new, "ES256")).id == new

    asyncio.run(run())


def test_a_silent_issuer_holds_nobody_up_for_long_whose_key_is_known(own_provider: Provider) -> None:
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
            assert {type(outcome) for outcome in outcomes} == {Unavailable}
        finally:
            own_provider.thaw()
        clock.now = 320
        assert (await keys.key(known, "ES256")).id == known
        # All those waited for one reading.
        wait_until(lambda: own_provider.served("/jwks") == 2)

    asyncio.run(run())


def test_a_key_is_used_for_what_it_is_for() -> None:
    signing, rsa, edwards = ({**key, "kid": name} for key, name in zip(new_keys(), "abc", strict=True))
    secret = {"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).decode(), "kid": "d"}
    listed = [
        signing, rsa, {**rsa, "alg": "PS256", "kid": "e"}, edwards, secret, {**secret, "alg": "RS256"},
        {**rsa, "use": "enc"}, {**rsa, "alg": "RSA-OAEP"}, {**rsa, "alg": "HS256"}, {**rsa, "n": 7},
        {**signing, "crv": "P-384"}, {**signing, "crv": "secp256k1"}, {}, {"kty": []}, 7, None,
        {**rsa, "alg": ["RS256"]}, {**rsa, "use": []},
    ]  # fmt: skip
    assert {key.id: sorted(key.algorithms) for key in keys_in(json.loads(json.dumps({"keys": listed})))} == {
        "a": ["ES256"],
        "b": ["PS256", "PS384", "PS512", "RS256", "RS384", "RS512"],
        "c": ["EdDSA"],
        "e": ["PS256"],
    }


def test_a_token_names_its_key_where_several_would_fit(
    new_service: Callable[[str], Any], own_provider: Provider
) -> None:
    nameless = own_provider.signed(own_provider.token(claims=CLAIMS), header={"kid": None})
    assert "kid" not in jwt.get_unverified_header(nameless)
    with new_service(own_provider.issuer) as service:
        assert status(service, nameless) == 200
    own_provider.stop()
    own_provider.keys += new_keys()
    own_provider.start()
    with new_service(own_provider.issuer) as service:
        assert status(service, own_provider.token(claims=CLAIMS)) == 200
        assert status(service, nameless) == 401
