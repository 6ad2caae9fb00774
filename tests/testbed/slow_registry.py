"""A registry that hurts whoever pulls from it: it says nothing, or sends its layers drop by drop."""

import hashlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

from tests.testbed.registry import CONFIGURATION, LAYER, MANIFEST

LAYER_BYTES = 64 * 2**20
LAYERS = 3  # as many as dockerd downloads at a time, for all of its users together


@dataclass
class SlowRegistry:
    """Where the answers get stuck, and who waits for them.

    Attributes:
        silent_at: `manifests` never answers; `layers` sends `bytes_per_s` of each layer.
        waiting: the paths of the requests that are open now.
    """

    address: str
    silent_at: Literal["manifests", "layers"]
    bytes_per_s: int = 0
    port: int = 0
    waiting: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def image(self, name: str) -> str:
        """A reference to an image that never arrives; each has layers of its own."""
        return f"{self.address}:{self.port}/{name}:1"

    def pulls(self) -> int:
        """How many images are being pulled at this moment."""
        with self.lock:
            return len({path.split("/")[2] for path in self.waiting})

    def have_been_asked(self) -> int:
        """For how many images a pull was ever begun."""
        with self.lock:
            return len({path.split("/")[2] for path in self.asked if path.count("/") > 2})


@contextmanager
def slow_registry(
    address: str, silent_at: Literal["manifests", "layers"], bytes_per_s: int = 0
) -> Iterator[SlowRegistry]:
    with _Server((address, 0), _Handler) as server:
        server.told = SlowRegistry(address, silent_at, bytes_per_s, server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.told
        finally:
            server.told.ended.set()
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    told: SlowRegistry

    def handle_error(self, *_: Any) -> None:
        """Whoever pulls goes away in the middle; that is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        told = cast(_Server, self.server).told
        with told.lock:
            told.asked.append(self.path)
        if self.path == "/v2/":
            self._answer(b"{}", "application/json")
        elif "/manifests/" in self.path:
            if told.silent_at == "manifests":
                self._drip(told, 0)
            else:
                self._answer(_manifest(self.path.split("/")[2]), MANIFEST)
        elif self.path.endswith(_digest(_configuration(self.path.split("/")[2]))):
            self._answer(_configuration(self.path.split("/")[2]), CONFIGURATION)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(LAYER_BYTES))
            self.end_headers()
            self._drip(told, told.bytes_per_s)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _drip(self, told: SlowRegistry, bytes_per_s: int) -> None:
        """Until the other side has gone away."""
        with told.lock:
            told.waiting.append(self.path)
        try:
            while not (told.ended.is_set() or _is_closed(self.connection)):
                if bytes_per_s:
                    self.wfile.write(b"\0" * max(1, bytes_per_s // 20))
                    self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass
        finally:
            self.close_connection = True
            with told.lock:
                told.waiting.remove(self.path)

    def _answer(self, body: bytes, media_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Docker-Content-Digest", _digest(body))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""


def _is_closed(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""


def _configuration(name: str) -> bytes:
    layers = [_digest(f"{name} unpacked {number}".encode()) for number in range(LAYERS)]
    made = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["sleep", "1000"]},
        "rootfs": {"type": "layers", "diff_ids": layers},
    }
    return json.dumps(made).encode()


def _manifest(name: str) -> bytes:
    configuration = _configuration(name)
    made = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {
            "mediaType": CONFIGURATION,
            "size": len(configuration),
            "digest": _digest(configuration),
        },
        "layers": [
            {"mediaType": LAYER, "size": LAYER_BYTES, "digest": _digest(f"{name} layer {number}".encode())}
            for number in range(LAYERS)
        ],
    }
    return json.dumps(made).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
