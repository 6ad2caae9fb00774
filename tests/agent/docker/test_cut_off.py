"""Closing a stream ends its request to an engine that does not answer."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import pytest

from mooring.agent.docker.client import Engine
from tests.testbed.waiting import wait_until


class SilentEngine(socketserver.ThreadingUnixStreamServer):
    """Answers each GET with its API version, and does not answer any POST."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, _Handler)
        self.requested, self.disconnected = threading.Event(), threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"ApiVersion": "1.41"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        engine = cast(SilentEngine, self.server)
        engine.requested.set()
        assert self.connection.recv(1) == b""
        self.close_connection = True
        engine.disconnected.set()

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentEngine]:
    with SilentEngine(str(tmp_path / "engine.sock")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(silent: SilentEngine, tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine({"DOCKER_HOST": f"unix://{tmp_path}/engine.sock"})) as made:
        yield made


def test_closing_a_stream_ends_a_request_without_an_answer(silent: SilentEngine, engine: Engine) -> None:
    stream = engine.stream("POST", "/images/create", params={"fromImage": "r.example.com/x"})
    assert silent.requested.wait(5)
    assert stream.read(0.05) is None
    stream.close()
    assert silent.disconnected.wait(5)
    wait_until(lambda: not stream._thread.is_alive())


def test_closing_a_stream_at_once_leaves_no_thread(engine: Engine) -> None:
    streams = [engine.stream("POST", "/images/create") for _ in range(20)]
    for stream in streams:
        stream.close()
    wait_until(lambda: not any(stream._thread.is_alive() for stream in streams))
