"""Requests with a token."""

import ssl
from typing import Any

import httpx

from tests.problems import problem
from tests.service import RunningService

# Making one takes 25 ms, which httpx spends for each client also where there is no TLS.
TLS = ssl.create_default_context()


def ask(service: RunningService, token: str, path: str = "/v1/me") -> httpx.Response:
    """The answer to who the token's owner is, or to another question."""
    return httpx.get(
        f"{service.url}{path}", headers={"Authorization": f"Bearer {token}"}, verify=TLS, timeout=70
    )


def status(service: RunningService, token: str) -> int:
    """Of a request that needs a role somewhere."""
    return ask(service, token, "/v1/instances").status_code


def me(service: RunningService, token: str) -> dict[str, Any]:
    answer = ask(service, token)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(service: RunningService, token: str, why: str) -> None:
    """Holds that it is answered 401, and that the message says why."""
    answer = ask(service, token)
    assert why in problem(answer, 401, "unauthorized")["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"
