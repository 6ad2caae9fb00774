"""Copies one stream between a container and a WebSocket, in both directions, until one of them ends."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mooring.agent.runtime import ContainerStream, RuntimeUnavailable, StreamRefused
from mooring.schemas.agent_streams import Signal, StreamStatus, WindowSize
from mooring_client.stream_messages import (
    KEEPALIVE,
    STDIN_CLOSED,
    BadMessage,
    Channel,
    message,
    split,
)

# Only a write detects a lost connection. Kubernetes' clients ignore a message without data.
KEEPALIVE_EVERY_S: Final = 5.0
CLOSED_WITHIN_S: Final = 15.0

log = logging.getLogger(__name__)


class StreamSession:
    """Nothing is buffered here: a read waits until the write before it is done.

    Args:
        timeout_s: the stream then ends with `exec_timeout`; 0: never.
    """

    def __init__(
        self,
        socket: ClientConnection,
        stream: ContainerStream,
        timeout_s: int,
        keepalive_every_s: float,
    ) -> None:
        self._socket, self._stream = socket, stream
        self._timeout_s, self._keepalive_every_s = timeout_s, keepalive_every_s
        self._closing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Copy until the stream or the connection ends, or this task is cancelled; then close both."""
        output = asyncio.ensure_future(self._send_output())
        tasks: set[asyncio.Future[Any]] = {
            output,
            asyncio.ensure_future(self._receive_input()),
            asyncio.ensure_future(self._send_keepalives()),
            # Also detects the end of a connection while `_receive_input` waits for the program.
            asyncio.ensure_future(self._socket.wait_closed()),
        }
        try:
            await self._socket.send(KEEPALIVE)
            await asyncio.wait(tasks, timeout=self._timeout_s or None, return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                await self._send_status(output.result())
            elif not any(task.done() for task in tasks):
                await self._end_late(output)
        finally:
            try:
                await _cancelled(tasks)
            finally:
                await self._close_stream()

    async def _end_late(self, output: asyncio.Future[StreamStatus]) -> None:
        """Kill the command before the status is sent: nobody may read it, and then `send` waits."""
        await _cancelled({output})  # the status is the last message
        await self._close_stream()
        message_text = f"the command did not end within {self._timeout_s} s and was killed"
        await self._send_status(StreamStatus.of_error("exec_timeout", message_text))

    async def _send_status(self, status: StreamStatus) -> None:
        await self._socket.send(message(Channel.STATUS, status.model_dump_json().encode()))

    async def _send_output(self) -> StreamStatus:
        try:
            while (found := await self._stream.read()) is not None:
                await self._socket.send(message(*found))
            return await self._stream.status()
        except StreamRefused as refused:
            return refused.status
        except RuntimeUnavailable as error:
            log.warning("a stream failed: %s", error)
            return StreamStatus.of_error("docker_unavailable", "The node's container engine does not answer")
        except ConnectionClosed:
            raise
        except Exception:
            log.exception("a stream failed")
            return StreamStatus.of_error("internal_error", "The node's agent failed; see its log")

    async def _receive_input(self) -> None:
        """Ends with the connection, or at a message that does not follow the framing."""
        with suppress(ConnectionClosed):
            async for received in self._socket:
                try:
                    channel, data = split(received if isinstance(received, bytes) else received.encode())
                    await self._handle(channel, data)
                except (BadMessage, ValidationError) as error:
                    log.warning("a stream is ended by an invalid message: %s", error)
                    return
                except Exception:
                    log.exception("a stream failed")
                    return

    async def _handle(self, channel: Channel, data: bytes) -> None:
        match channel:
            case Channel.STDIN if data:
                await self._stream.write(data)
            case Channel.RESIZE:
                await self._stream.resize(WindowSize.model_validate_json(data))
            case Channel.SIGNAL:
                await self._stream.signal(Signal.model_validate_json(data).signal)
            case Channel.CLOSE if data == STDIN_CLOSED[1:]:
                await self._stream.end_input()
            case _:
                """A keepalive, or a channel that only nodes send on."""

    async def _send_keepalives(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                await asyncio.sleep(self._keepalive_every_s)
                await self._socket.send(KEEPALIVE)

    async def _close_stream(self) -> None:
        """Also if this task is cancelled: otherwise the command would run on without a user. Closes once."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._closed())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            await self._closing
            raise

    async def _closed(self) -> None:
        try:
            async with asyncio.timeout(CLOSED_WITHIN_S):
                await self._stream.close()
        except (RuntimeUnavailable, TimeoutError) as error:
            log.warning("a stream's command may still run: %s", error)


async def _cancelled(tasks: set[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    # Their exceptions concern a connection that has ended.
    await asyncio.gather(*tasks, return_exceptions=True)
