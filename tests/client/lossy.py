"""A proxy in front of a service that loses answers, answers by itself, or is away."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self, cast

import httpx

Answer = tuple[int, dict[str, str], bytes]
_KEPT = {"content-type", "authorization", "idempotency-key", "accept", "last-event-id", "if-match"}


class LossyProxy(ThreadingHTTPServer):
    """Forwards requests.

    Attributes:
        seen: method, path and idempotency key of each request.
        lose: how many of the next answers to lose, after the service has processed the request.
        answers: answers to give instead of the service's, the next one first.
        cut_after: end the next event streams after so many bytes; the next one first.
    """

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[tuple[str, str, str | None]] = []
        self.lose = 0
        self.answers: list[Answer] = []
        self.cut_after: list[int] = []
        self.on_request: Callable[[], object] = lambda: None
        self._thread = Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        proxy = cast(LossyProxy, self.server)
        proxy.on_request()
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        proxy.seen.append((self.command, self.path, self.headers.get("Idempotency-Key")))
        if proxy.answers:
            self._send(*proxy.answers.pop(0))
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() in _KEPT}
        with httpx.stream(
            self.command, proxy.target + self.path, content=body, headers=headers, timeout=70
        ) as answer:
            if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                self._copy_events(answer, proxy)
                return
            content = answer.read()
        if proxy.lose > 0:
            proxy.lose -= 1
            self.close_connection = True
            return
        wanted = {"content-type", "retry-after", "mooring-applied"} & answer.headers.keys()
        self._send(answer.status_code, {name: answer.headers[name] for name in wanted}, content)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle  # noqa: N815 - names of the base class

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _copy_events(self, answer: httpx.Response, proxy: LossyProxy) -> None:
        left = proxy.cut_after.pop(0) if proxy.cut_after else None
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in answer.iter_raw():
            sent = data if left is None else data[:left]
            self.wfile.write(f"{len(sent):x}\r\n".encode() + sent + b"\r\n")
            left = None if left is None else left - len(sent)
            if left == 0:
                return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""
