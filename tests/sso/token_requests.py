"""Requests with an access token."""

import ssl
from typing import Any

import httpx

from tests.problems import problem
from tests.service import RunningService
from tests.testbed.waiting import wait_until

# httpx would create a context for each request, also over http, and each takes 25 ms.
SHARED_TLS = ssl.create_default_context()


def get_with_token(service: RunningService, token: str, path: str = "/v1/me") -> httpx.Response:
    """Send a GET request with the token."""
    return httpx.get(
        f"{service.url}{path}", headers={"Authorization": f"Bearer {token}"}, verify=SHARED_TLS, timeout=70
    )


def status(service: RunningService, token: str) -> int:
    """The status of a request that needs a role in some project."""
    return _answered(service, token, "/v1/instances").status_code


def me(service: RunningService, token: str) -> dict[str, Any]:
    answer = _answered(service, token)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def require_unauthorized(service: RunningService, token: str, why: str) -> None:
    """Fails unless the request is answered 401 and the detail contains `why`."""
    answer = _answered(service, token)
    assert why in problem(answer, 401, "unauthorized")["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"


def _answered(service: RunningService, token: str, path: str = "/v1/me") -> httpx.Response:
    """Send the request again while the provider, on a busy machine, answers later than the service waits."""

    def answer_unless_unavailable() -> httpx.Response | None:
        answer = get_with_token(service, token, path)
        return None if answer.status_code == 503 else answer

    return wait_until(answer_unless_unavailable, 30, interval_s=0.1)  # it asks the provider again after 10 s
