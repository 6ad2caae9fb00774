"""A registry that does not answer, or sends its layers very slowly."""

import hashlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

from tests.testbed.registry import CONFIGURATION, LAYER, MANIFEST

LAYER_BYTES = 64 * 2**20
LAYERS = 3  # as many as dockerd downloads at a time, for all pulls together


@dataclass
class SlowRegistry:
    """The configuration of the registry, and its requests.

    Attributes:
        silent_at: what it does not send: no manifest, or of each layer only `bytes_per_s`.
        waiting: the paths of the open requests.
        requested: the paths of all requests so far.
    """

    address: str
    silent_at: Literal["manifests", "layers"]
    bytes_per_s: int = 0
    port: int = 0
    waiting: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def image(self, name: str) -> str:
        """Return the reference of an image that cannot be pulled to its end. Each name has its own layers."""
        return f"{self.address}:{self.port}/{name}:1"

    def pulls(self) -> int:
        """Return how many images are being pulled now."""
        with self.lock:
            return len({path.split("/")[2] for path in self.waiting})

    def begun(self) -> int:
        """Return for how many images a pull has begun."""
        with self.lock:
            return len({path.split("/")[2] for path in self.requested if path.count("/") > 2})


@contextmanager
def slow_registry(
    address: str, silent_at: Literal["manifests", "layers"], bytes_per_s: int = 0
) -> Iterator[SlowRegistry]:
    with _Server((address, 0), _Handler) as server:
        server.config = SlowRegistry(address, silent_at, bytes_per_s, server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.config
        finally:
            server.config.ended.set()
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    config: SlowRegistry

    def handle_error(self, *_: Any) -> None:
        """Quiet: clients disconnect in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        config = cast(_Server, self.server).config
        with config.lock:
            config.requested.append(self.path)
        if self.path == "/v2/":
            self._answer(b"{}", "application/json")
        elif "/manifests/" in self.path:
            if config.silent_at == "manifests":
                self._drip(config, 0)
            else:
                self._answer(_manifest(self.path.split("/")[2]), MANIFEST)
        elif self.path.endswith(_digest(_configuration(self.path.split("/")[2]))):
            self._answer(_configuration(self.path.split("/")[2]), CONFIGURATION)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(LAYER_BYTES))
            self.end_headers()
            self._drip(config, config.bytes_per_s)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _drip(self, config: SlowRegistry, bytes_per_s: int) -> None:
        """Send bytes until the client disconnects."""
        with config.lock:
            config.waiting.append(self.path)
        try:
            while not (config.ended.wait(0.05) or _is_closed(self.connection)):
                if bytes_per_s:
                    self.wfile.write(b"\0" * max(1, bytes_per_s // 20))
                    self.wfile.flush()
        except OSError:
            pass
        finally:
            self.close_connection = True
            with config.lock:
                config.waiting.remove(self.path)

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
        """Quiet."""


def _is_closed(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""


def _configuration(name: str) -> bytes:
    layers = [_digest(f"{name} unpacked {number}".encode()) for number in range(LAYERS)]
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["sleep", "1000"]},
        "rootfs": {"type": "layers", "diff_ids": layers},
    }
    return json.dumps(document).encode()


def _manifest(name: str) -> bytes:
    configuration = _configuration(name)
    document = {
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
    return json.dumps(document).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
