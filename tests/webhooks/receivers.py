"""Receivers of webhooks: HTTP servers on loopback that record what they get."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook as Verifier

from tests.testbed.waiting import wait_until

LOOPBACK = "127.0.0.0/8,::1/128"


@dataclass(frozen=True)
class Received:
    """A request of a webhook. `path`: with the query."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def message_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def data(self) -> dict[str, Any]:
        return dict(self.event["data"])


@dataclass(frozen=True)
class Reply:
    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


Answering = Callable[[Received], Reply]


class Receiver:
    """Records requests, and answers each with what `answer` returns for it; it may block."""

    def __init__(self, answer: Answering | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.answer = answer or (lambda _received: Reply())
        self.received: list[Received] = []
        self._server = _Server((host, port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="receiver")

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def __enter__(self) -> "Receiver":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def wait(self, count: int = 1, timeout_s: float = 10) -> list[Received]:
        """Wait until there are as many requests."""
        wait_until(lambda: len(self.received) >= count, timeout_s)
        return list(self.received)

    def transitions(self) -> dict[str, list[tuple[int, str]]]:
        """By instance: the versions and states of its events, in the order in which they came."""
        found: dict[str, list[tuple[int, str]]] = {}
        for each in list(self.received):
            if each.event["type"] == "instance.state_changed":
                data = each.data
                found.setdefault(data["instance_id"], []).append((data["version"], data["to"]))
        return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            received = Received(self.path, headers, body, time.time())
            receiver.received.append(received)
            reply = receiver.answer(received)
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
            except OSError:
                return  # the sender has gone

        do_GET = do_POST  # noqa: N815 - named by the base class

        def log_message(self, *_arguments: object) -> None:
            return

    return Handler


def verified(secret: str, received: Received) -> dict[str, Any]:
    """The body, checked with the specification's own library. Raises WebhookVerificationError."""
    return dict(Verifier(secret).verify(received.body, received.headers))


@contextmanager
def stalled() -> Iterator[tuple[Answering, threading.Event]]:
    """An answer that does not come until the event is set, at the latest at the end of the block."""
    released = threading.Event()

    def answer(_received: Received) -> Reply:
        released.wait(60)
        return Reply()

    try:
        yield answer, released
    finally:
        released.set()
