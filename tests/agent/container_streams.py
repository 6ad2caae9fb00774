"""Streams of a runtime, without an agent: opened, read to their end and closed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mooring.agent.runtime import Container, ContainerStream, Runtime, StreamRefused
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamStatus
from mooring_client.stream_messages import Channel

WITHIN_S = 60.0

Result = TypeVar("Result")


@dataclass
class Ran:
    """A stream that has ended."""

    messages: list[tuple[Channel, bytes]] = field(default_factory=list)
    status: StreamStatus = field(default_factory=StreamStatus)

    @property
    def stdout(self) -> bytes:
        return b"".join(data for on, data in self.messages if on is Channel.STDOUT)

    @property
    def stderr(self) -> bytes:
        return b"".join(data for on, data in self.messages if on is Channel.STDERR)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The channel and the text of each log line."""
        return [(on.name.lower(), data.partition(b" ")[2].decode()) for on, data in self.messages]

    @property
    def times(self) -> list[str]:
        return [data.partition(b" ")[0].decode() for _on, data in self.messages]


def within(work: Coroutine[Any, Any, Result], timeout_s: float = WITHIN_S) -> Result:
    """Run a coroutine in an event loop of its own."""
    return asyncio.run(_limited(work, timeout_s))


async def _limited(work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    async with asyncio.timeout(timeout_s):
        return await work


@asynccontextmanager
async def opened(opening: Awaitable[ContainerStream]) -> AsyncIterator[ContainerStream]:
    stream = await opening
    try:
        yield stream
    finally:
        await stream.close()


async def read_all(stream: ContainerStream) -> Ran:
    ran = Ran()
    while (found := await stream.read()) is not None:
        ran.messages.append(found)
    ran.status = await stream.status()
    return ran


async def with_late_input(stream: ContainerStream) -> Ran:
    """Send input, end it, and send more. Read to the end."""
    await stream.write(b"one")
    await stream.end_input()
    await stream.write(b"late")
    await stream.end_input()
    return await read_all(stream)


async def _to_end(opening: Awaitable[ContainerStream]) -> Ran:
    async with opened(opening) as stream:
        return await read_all(stream)


def run(runtime: Runtime, container: Container, *command: str, **more: Any) -> Ran:
    """Run a command to its end; `more` are fields of its request."""
    request = ExecRequest(command=list(command), **more)
    return within(_to_end(runtime.exec(container.container_id, request)))


def logs(runtime: Runtime, container_id: str, **more: Any) -> Ran:
    """Read a log to its end; `more` are fields of its request."""
    request = LogsRequest(**{"tail": None, "since": None, "follow": False, **more})
    return within(_to_end(runtime.logs(container_id, request)))


def refusal(run_: Callable[[], object]) -> str:
    """The code with which a stream is refused."""
    try:
        run_()
    except StreamRefused as refused:
        assert refused.status.reason is not None
        return refused.status.reason.code
    raise AssertionError("the stream was not refused")
