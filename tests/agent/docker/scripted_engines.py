"""An engine that answers each request with bytes that the test chooses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mooring.agent.docker.streams.engine_streams import EngineAddress

END = b"0\r\n\r\n"  # of a chunked body


def answer(body: bytes, status: str = "200 OK") -> bytes:
    """A complete answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(*chunks: bytes) -> bytes:
    """An answer whose body has no end yet."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


@dataclass
class ScriptedEngine:
    """Closes each connection after its answer, unless `stays_open`.

    Attributes:
        answer: None: the connection is closed before the request is read.
        requests: the first line of each.
        received: what came after the headers.
    """

    address: EngineAddress
    answer: bytes | None
    stays_open: bool = False
    requests: list[str] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.answer is not None:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head.split(b"\r\n")[0].decode())
                writer.write(self.answer)
                await writer.drain()
            while self.stays_open and (data := await reader.read(65_536)):
                self.received += data
        except OSError:
            pass  # the client has ended the connection
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def scripted_engine(
    folder: Path, answer: bytes | None, *, stays_open: bool = False
) -> AsyncIterator[ScriptedEngine]:
    path = str(folder / "scripted.sock")
    engine = ScriptedEngine(EngineAddress(path), answer, stays_open)
    async with await asyncio.start_unix_server(engine.handle, path):
        yield engine
