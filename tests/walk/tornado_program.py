# mypy: ignore-errors
"""A tenant's program on tornado, the server of Jupyter. It runs in containers, and is never imported here."""

import asyncio
import hashlib
import json
import pathlib
import socket
import struct

import tornado.web
import tornado.websocket

MIB = 1024 * 1024
# Each MiB differs, so that a lost or repeated one is noticed.
LARGE = b"".join(hashlib.sha256(bytes([part])).digest() * (MIB // 32) for part in range(64))
FOLDER = pathlib.Path("/tmp/files")


class Request(tornado.web.RequestHandler):
    """What arrived."""

    def get(self):
        self.set_header("X-Method", self.request.method)
        self.write(json.dumps({"uri": self.request.uri, "fields": list(self.request.headers.get_all())}))

    head = get


@tornado.web.stream_request_body
class Upload(tornado.web.RequestHandler):
    def prepare(self):
        self.received, self.length = hashlib.sha256(), 0

    def data_received(self, chunk):
        self.received.update(chunk)
        self.length += len(chunk)

    def post(self):
        framing = "chunked" if "Transfer-Encoding" in self.request.headers else "length"
        self.write(f"{framing} {self.length} {self.received.hexdigest()}")

    put = post


class Events(tornado.web.RequestHandler):
    async def get(self):
        self.set_header("Content-Type", "text/event-stream")
        for number in (1, 2, 3):
            self.write(f"data: {number}\n\n")
            await self.flush()
        await asyncio.Event().wait()


class Redirect(tornado.web.RequestHandler):
    def get(self, kind):
        base = f"{self.request.protocol}://{self.request.host}" if kind == "absolute" else ""
        self.redirect(f"{base}/request?redirected")


async def cut(reader, writer):
    """Half an answer, then a reset."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf an answer")
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class Echo(tornado.websocket.WebSocketHandler):
    def select_subprotocol(self, subprotocols):
        return subprotocols[-1] if subprotocols else None

    def on_message(self, message):
        if message == "ping me":
            self.ping(b"from the program")
        elif isinstance(message, str) and message.startswith("close "):
            self.close(int(message[6:]), "as asked")
        else:
            self.write_message(message, binary=isinstance(message, bytes))

    def on_pong(self, data):
        self.write_message(b"pong: " + data, binary=True)

    def on_close(self):
        with (FOLDER / "closed").open("a") as closed:
            closed.write(f"{self.close_code}\n")


async def main():
    FOLDER.mkdir()
    (FOLDER / "large").write_bytes(LARGE)
    (FOLDER / "text.txt").write_bytes(b"the same line\n" * 1000)
    tornado.web.Application(
        [
            ("/request", Request),
            ("/upload", Upload),
            ("/events", Events),
            ("/redirect/(.*)", Redirect),
            ("/echo", Echo),
            ("/files/(.*)", tornado.web.StaticFileHandler, {"path": FOLDER}),
        ],
        compress_response=True,
    ).listen(8000, "127.0.0.1", max_body_size=100 * MIB)
    await (await asyncio.start_server(cut, "127.0.0.1", 8001)).serve_forever()


asyncio.run(main())
