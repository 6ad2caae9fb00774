"""CPU time that authentication, authorization and rate limiting add to a request.

python -m benchmarks.auth_cost [rounds]

Sends the same GET with a member's key to the ASGI application in this process, with and without the checks.
Each round sends 500 requests each way, in alternating blocks of 50, and takes the CPU time of the process
(with its threads, without a client or sockets). Keys are cached for half a second, as in production. The
figure is the median difference over all rounds. Each round has a new key, since a key is limited to 600 reads
a minute.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp
from tests.service import Client, RunningService, running, settings_for

from benchmarks.figures import median, verdict
from mooring.api.auth import authorization
from mooring.api.auth.rules import Rule
from mooring.core.access import Access, Caller, Permission

REQUESTS, BLOCK = 500, 50
BOUND_MS = 0.3


def main(rounds: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="mooring-bench-") as folder,
        running(settings_for(f"sqlite:///{folder}/mooring.db", Path(folder) / "data")) as service,
        service.client as admin,
    ):
        app: ASGIApp = service.service._server.config.app  # type: ignore[assignment]
        keys = [_new_key(admin) for _ in range(rounds)]
        asyncio.run(_warm_up(app, _new_key(admin)))
        taken = [asyncio.run(_round(app, service, key)) for key in keys]
    with_ms, without_ms = (median(values) for values in zip(*taken, strict=True))
    added_ms = median([checked - unchecked for checked, unchecked in taken])
    print(
        f"GET /v1/me: {with_ms:.3f} ms, without the checks {without_ms:.3f} ms ({rounds} x {REQUESTS} each)"
    )
    return 0 if verdict("CPU added by the checks", added_ms, BOUND_MS, " ms") else 1


def _new_key(admin: Client) -> str:
    answer = admin.post("/v1/api-keys", json={"name": "bench", "role": "member"})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


async def _warm_up(app: ASGIApp, key: str) -> None:
    for _ in range(BLOCK):
        await _get(app, key)


async def _round(app: ASGIApp, service: RunningService, key: str) -> tuple[float, float]:
    """CPU milliseconds of a request with the checks, and without."""
    caller = await service.service._server._context.credentials.caller(key)
    with_s = without_s = 0.0
    for block in range(REQUESTS // BLOCK):
        # Alternate which of the two is measured first.
        for checked in (True, False) if block % 2 == 0 else (False, True):
            if checked:
                with_s += await _cpu_s(app, key)
            else:
                with _without_checks(caller):
                    without_s += await _cpu_s(app, key)
    return with_s / REQUESTS * 1e3, without_s / REQUESTS * 1e3


async def _cpu_s(app: ASGIApp, key: str) -> float:
    began = time.process_time()
    for _ in range(BLOCK):
        await _get(app, key)
    return time.process_time() - began


@contextmanager
def _without_checks(caller: Caller) -> Iterator[None]:
    async def skip(request: Request, rule: Rule) -> None:
        request.state.access = Access(caller, rule.permission or Permission.READ)

    original = authorization._authorize
    authorization._authorize = skip
    try:
        yield
    finally:
        authorization._authorize = original


async def _get(app: ASGIApp, key: str) -> None:
    sent: list[MutableMapping[str, Any]] = []
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "GET", "scheme": "http", "path": "/v1/me", "raw_path": b"/v1/me", "query_string": b"",
        "root_path": "", "server": ("127.0.0.1", 8700), "client": ("127.0.0.1", 50_000), "state": {},
        "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())],
    }  # fmt: skip

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
