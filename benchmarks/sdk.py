"""CPU time of a call of the SDK, compared with a call of bare httpx.

    python -m benchmarks.sdk [turns]

Each side sends the same requests to a server in another process, over one connection, in turns of 50 calls.
Bare httpx decodes the JSON of the answer; the SDK makes a model of it.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack

import httpx
from tests.service import ADMIN_KEY

from benchmarks import stack
from benchmarks.figures import median, verdict
from mooring_client import AsyncMooring, Mooring

CALLS = 50
MOST_ADDED_MS = 0.3
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}
SPEC = {"image": "busybox:1.36", "gpus": {"count": 2}}
DRY_RUN = "/v1/instances?dry_run=true"
# What is compared, a turn of bare httpx, and a turn of the SDK.
Pair = tuple[str, Callable[[], object], Callable[[], object]]


def main(turns: int) -> int:
    with stack.server_alone() as server, ExitStack() as exits:
        admin = exits.enter_context(server.client)
        # Without nodes it waits, so that its JSON stays the same.
        waiting = admin.create(**SPEC)["id"]
        pairs = [*synchronous(server.url, waiting, exits), *asynchronous(server.url, waiting, exits)]
        passed = [compared(*pair, turns) for pair in pairs]
    return 0 if all(passed) else 1


def synchronous(url: str, instance_id: str, exits: ExitStack) -> Iterator[Pair]:
    bare = exits.enter_context(httpx.Client(base_url=url, headers=HEADERS))
    client = exits.enter_context(Mooring(url, ADMIN_KEY))

    def turn(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(CALLS)]

    path = f"/v1/instances/{instance_id}"
    yield "get", turn(lambda: bare.get(path).json()), turn(lambda: client.instances.get(instance_id))
    yield (
        "dry run",
        turn(lambda: bare.post(DRY_RUN, json=SPEC).json()),
        turn(lambda: client.instances.dry_run("busybox:1.36", gpus=2)),
    )


def asynchronous(url: str, instance_id: str, exits: ExitStack) -> Iterator[Pair]:
    runner = exits.enter_context(asyncio.Runner())
    bare = httpx.AsyncClient(base_url=url, headers=HEADERS)
    exits.callback(lambda: runner.run(bare.aclose()))
    client = AsyncMooring(url, ADMIN_KEY)
    exits.callback(lambda: runner.run(client.close()))

    async def repeated(call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(CALLS):
            await call()

    def turn(call: Callable[[], Awaitable[object]]) -> Callable[[], object]:
        return lambda: runner.run(repeated(call))

    async def bare_get() -> object:
        return (await bare.get(f"/v1/instances/{instance_id}")).json()

    async def bare_dry_run() -> object:
        return (await bare.post(DRY_RUN, json=SPEC)).json()

    yield "get, async", turn(bare_get), turn(lambda: client.instances.get(instance_id))
    yield (
        "dry run, async",
        turn(bare_dry_run),
        turn(lambda: client.instances.dry_run("busybox:1.36", gpus=2)),
    )


def compared(name: str, bare: Callable[[], object], product: Callable[[], object], turns: int) -> bool:
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(turns + 1):
        for side, turn in enumerate((bare, product)):
            began = time.process_time()
            turn()
            if number:  # the first turn warms both sides
                took[side].append((time.process_time() - began) / CALLS * 1e3)
    of_httpx, of_sdk = map(median, took)
    print(f"{name}: {of_sdk:.3f} ms by the SDK, {of_httpx:.3f} ms by httpx: {of_sdk / of_httpx:.2f} times")
    return verdict(f"{name}, more than httpx", of_sdk - of_httpx, MOST_ADDED_MS, " ms")


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
