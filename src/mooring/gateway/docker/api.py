"""Calls of the API with the key of the Docker client, so that its rules and its audit log apply unchanged."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from mooring_client.errors import MooringError, Unavailable

_TIMEOUT_S: Final = 60.0
_CONNECT_S: Final = 5.0
_MESSAGE_BYTES: Final = 4000


class ApiClient:
    """A client of one replica, or of the load balancer in front of several.

    Args:
        calls: how many may be open at the same time; followed logs stay open.
    """

    def __init__(self, url: str, calls: int) -> None:
        limits = httpx.Limits(max_connections=calls, max_keepalive_connections=64)
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        verify = url.startswith("https://")  # to load the CA certificates takes time
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self, key: str, address: str | None, method: str, path: str, *, json: Any = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Raises MooringError: the API's error; Unavailable: it cannot be reached."""
        headers = _headers(key, address)
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        try:
            answer = await self._http.request(method, path, json=json, headers=headers)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        return _content(answer)

    @asynccontextmanager
    async def lines(self, key: str, address: str | None, path: str) -> AsyncIterator[AsyncIterator[str]]:
        """Open server-sent events, as lines. Raises as `call`, also while they are read."""
        headers = _headers(key, address) | {"Accept": "text/event-stream"}
        try:
            async with self._http.stream("GET", path, headers=headers) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    _content(answer)
                yield answer.aiter_lines()
        except httpx.HTTPError as error:
            raise _unreachable(error) from error


async def parsed(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The data of events. Raises MooringError: the stream has ended early."""
    async for text in lines:
        if text.startswith("data: "):
            event: dict[str, Any] = json.loads(text[6:])
            if "error" in event:
                raise error_of(str(event["error"]["code"]), str(event["error"]["message"]))
            yield event


def _headers(key: str, address: str | None) -> dict[str, str]:
    forwarded = {"X-Forwarded-For": address} if address else {}
    return {"Authorization": f"Bearer {key}", **forwarded}


def _unreachable(error: httpx.HTTPError) -> Unavailable:
    return Unavailable(f"the gateway cannot reach the API ({type(error).__name__}); try again soon")


def _content(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json() if answer.content else {}
    except ValueError:
        content = {}
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    if answer.status_code < 400:
        return found
    message = str(found.get("detail") or found.get("title") or f"the API answered {answer.status_code}")
    problems = found.get("errors")
    if isinstance(problems, list) and problems:
        message += ": " + "; ".join(
            str(each.get("message", each)) for each in problems if isinstance(each, dict)
        )
    retry_after = answer.headers.get("Retry-After", "")
    raise error_of(
        str(found.get("code")), message, retry_after_s=int(retry_after) if retry_after.isdigit() else None
    )


def error_of(code: str, message: str, *, retry_after_s: int | None = None) -> MooringError:
    """The error with a code that the API has answered."""
    kind = MooringError.by_code.get(code, MooringError)
    return kind(message[:_MESSAGE_BYTES], retry_after_s=retry_after_s)
