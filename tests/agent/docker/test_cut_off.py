"""Requests to an engine that does not answer end: by a timeout, or when their stream is closed."""

import inspect
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import pytest

from mooring.agent.docker.client import Engine
from mooring.agent.runtime import RuntimeUnavailable
from tests.testbed.waiting import wait_until

# Arguments of each method that sends a request.
CALLS: dict[str, list[Any]] = {
    "ping": [],
    "info": [],
    "image": ["x"],
    "images": [],
    "image_ids": [],
    "image_ids_in_use": [],
    "import_image": [b"", "x:1"],
    "remove_image": ["x"],
    "registry_digest": ["x", {}],
    "create": [{"Image": "x"}, "name"],
    "start": ["c"],
    "container": ["c"],
    "containers": ["label"],
    "kill": ["c"],
    "limit_cpus": ["c", 1],
    "wait": ["c", 1],
    "remove": ["c"],
    "networks": ["label"],
    "network": ["n"],
    "create_network": [{}],
    "remove_network": ["n"],
    "volumes": ["label"],
    "volume": ["v"],
    "create_volume": [{}],
    "remove_volume": ["v"],
    "archive": ["c", "/x"],
    "put_archive": ["c", b""],
}
SEND_NOTHING = {"close", "forget_version", "streams"}
WAIT_FOR_BYTES = {"stream"}


class SilentEngine(socketserver.ThreadingUnixStreamServer):
    """Answers requests for its version, and nothing else."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, path: str) -> None:
        super().__init__(path, _Handler)
        self.requested, self.disconnected = threading.Event(), threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self.path.endswith("/version"):
            self.do_POST()
            return
        body = b'{"ApiVersion": "1.41"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        engine = cast(SilentEngine, self.server)
        engine.requested.set()
        while self.connection.recv(4096):  # the request's body
            pass
        self.close_connection = True
        engine.disconnected.set()

    def do_DELETE(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

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


def test_a_call_for_each_method_is_listed() -> None:
    methods = {name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")}
    assert methods == CALLS.keys() | SEND_NOTHING | WAIT_FOR_BYTES


def test_every_call_has_a_deadline(silent: SilentEngine) -> None:
    """Docker's library sets a timeout in its own methods only, not in requests that use its session."""
    with closing(Engine({"DOCKER_HOST": f"unix://{silent.server_address}"}, timeout_s=1)) as engine:
        threads = {name: threading.Thread(target=_fail, args=[engine, name], daemon=True) for name in CALLS}
        for thread in threads.values():
            thread.start()
        for thread in threads.values():
            thread.join(30)
        assert [name for name, thread in threads.items() if thread.is_alive()] == []


def _fail(engine: Engine, name: str) -> None:
    with pytest.raises(RuntimeUnavailable, match="timed out"):
        getattr(engine, name)(*CALLS[name])
