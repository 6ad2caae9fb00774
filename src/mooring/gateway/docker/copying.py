"""Copies between a Docker client's connection and the stream of a node."""

import asyncio
from typing import Any, Final

from mooring.gateway.docker.http import ClientGone, DockerConnection
from mooring.gateway.docker.shared import CopiedStream
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.tasks import cancelled
from mooring_client.stream_messages import MAX_DATA_BYTES, STDIN_CLOSED, Channel

_STATUS_WITHIN_S: Final = 2.0
_MAX_FRAME: Final = 32 * 1024
_PROBE_EVERY_S: Final = 5.0


def frame(channel: Channel, data: bytes) -> bytes:
    """Output as Docker sends it without a terminal."""
    number = 2 if channel is Channel.STDERR else 1
    return bytes([number, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


class RawClient:
    """The client's side of a stream.

    Args:
        tty: output has no frames.
        stdin: the client sends input.
        shown: the outputs that the client wants.
    """

    def __init__(
        self, connection: DockerConnection, *, tty: bool, stdin: bool, shown: frozenset[Channel]
    ) -> None:
        self._connection, self._tty, self._stdin, self._shown = connection, tty, stdin, shown

    async def write(self, channel: Channel, data: bytes) -> None:
        """Raises ClientGone."""
        if channel in self._shown or self._tty:
            for at in range(0, len(data), _MAX_FRAME):
                part = data[at : at + _MAX_FRAME]
                await self._connection.write_raw(part if self._tty else frame(channel, part))

    async def say(self, text: str) -> None:
        """Show a line of the gateway's own. Raises ClientGone."""
        end = "\r\n" if self._tty else "\n"
        await self.write(Channel.STDERR, f"mooring: {text}{end}".encode())

    async def read(self) -> bytes:
        return await self._connection.read_raw()

    async def copy(self, stream: CopiedStream, first: bytes = b"") -> StreamStatus | None:
        """Copy until one side ends. Returns the status; None: the client is gone.

        Args:
            first: input that was read before.
        """
        output = asyncio.ensure_future(self._copy_output(stream))
        given = asyncio.ensure_future(self._copy_input(stream, first))
        revoked = asyncio.ensure_future(stream.revoked.wait())
        tasks: set[asyncio.Future[Any]] = {output, given, revoked}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if given.done() and not output.done() and not revoked.done():
                return None
            async with asyncio.timeout(_STATUS_WITHIN_S):
                return await output
        except (ClientGone, TimeoutError):
            return None
        finally:
            await cancelled(*tasks)

    async def _copy_output(self, stream: CopiedStream) -> StreamStatus:
        while not isinstance(found := await stream.receive(), StreamStatus):
            channel, data = found
            if data and channel in {Channel.STDOUT, Channel.STDERR}:
                await self.write(channel, data)
        return found

    async def _copy_input(self, stream: CopiedStream, first: bytes) -> None:
        """Ends if the client is gone. At the end of its input, the client may still read.

        Then only a write shows whether it is there, so it gets a frame without data at times.
        """
        data = first or await self.read()
        while data:
            if self._stdin:
                for at in range(0, len(data), MAX_DATA_BYTES):
                    if not await stream.send(Channel.STDIN, data[at : at + MAX_DATA_BYTES]):
                        await asyncio.Event().wait()  # the output ends too, with the reason
            data = await self.read()
        if self._stdin:
            await stream.send(Channel.CLOSE, STDIN_CLOSED[1:])
        while not self._connection.writer.transport.is_closing():
            await asyncio.sleep(_PROBE_EVERY_S)
            if not self._tty:
                await self._connection.write_raw(frame(Channel.STDOUT, b""))
