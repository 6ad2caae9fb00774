"""Commands over WebSockets through server and agent, compared with the Docker SDK on the same dockerd.

    python -m benchmarks.streams [rounds]

Both sides run the same commands in one container, in turns. Through Mooring, bytes pass dockerd, the agent,
the server and the client, which is a process of its own on either side.
"""

import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from tests.nodes import websocket
from tests.service import ADMIN_KEY
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from mooring_client.stream_messages import STDIN_CLOSED, SUBPROTOCOL, Channel, message

MIB = 1024 * 1024
SIZE = 256 * MIB
CHUNK = bytes(64 * 1024)
KEYS = 200


class Product:
    """Commands through Mooring."""

    def __init__(self, made: stack.Stack, instance_id: str) -> None:
        self._made, self._instance_id = made, instance_id

    def opened(self, *command: str, **query: str) -> ClientConnection:
        base = self._made.server.url.replace("http", "ws", 1)
        asked = [("command", each) for each in command] + list(query.items())
        url = f"{base}/v1/instances/{self._instance_id}/exec/stream?{urlencode(asked)}"
        return websocket(url, f"Bearer {ADMIN_KEY}", SUBPROTOCOL)

    def runs_true(self) -> None:
        with self.opened("true") as stream:
            _read_all(stream)

    def downloads(self) -> int:
        with self.opened("head", "-c", str(SIZE), "/dev/zero") as stream:
            return _read_all(stream)

    def uploads(self) -> None:
        with self.opened("sh", "-c", "cat > /dev/null", stdin="true") as stream:
            for _ in range(SIZE // len(CHUNK)):
                stream.send(message(Channel.STDIN, CHUNK))
            stream.send(STDIN_CLOSED)
            _read_all(stream)

    def echoes(self) -> list[float]:
        with self.opened("cat", tty="true", stdin="true") as stream:
            return [self._echo(stream) for _ in range(KEYS)]

    @staticmethod
    def _echo(stream: ClientConnection) -> float:
        began = time.perf_counter()
        stream.send(message(Channel.STDIN, b"x"))
        stream.recv()
        return time.perf_counter() - began


def _read_all(stream: ClientConnection) -> int:
    received = 0
    try:
        while True:
            received += len(stream.recv(decode=False)) - 1
    except ConnectionClosed:
        return received


class Direct:
    """The same commands through the Docker SDK."""

    def __init__(self, made: stack.Stack, container_id: str) -> None:
        self._api, self._container_id = made.node.client.api, container_id

    def _created(self, *command: str, **options: Any) -> str:
        return str(self._api.exec_create(self._container_id, list(command), **options)["Id"])

    def runs_true(self) -> None:
        exec_id = self._created("true")
        self._api.exec_start(exec_id)
        assert self._api.exec_inspect(exec_id)["ExitCode"] == 0

    def downloads(self) -> int:
        exec_id = self._created("head", "-c", str(SIZE), "/dev/zero")
        return sum(len(each) for each in self._api.exec_start(exec_id, stream=True))

    def uploads(self) -> None:
        exec_id = self._created("sh", "-c", "cat > /dev/null", stdin=True)
        connection: Any = self._api.exec_start(exec_id, socket=True)
        for _ in range(SIZE // len(CHUNK)):
            connection._sock.sendall(CHUNK)
        connection._sock.shutdown(1)
        while connection._sock.recv(len(CHUNK)):
            pass
        connection.close()

    def echoes(self) -> list[float]:
        exec_id = self._created("cat", tty=True, stdin=True)
        connection: Any = self._api.exec_start(exec_id, tty=True, socket=True)
        took = []
        for _ in range(KEYS):
            began = time.perf_counter()
            connection._sock.sendall(b"x")
            connection._sock.recv(100)
            took.append(time.perf_counter() - began)
        connection._sock.sendall(b"\r\x04")
        connection.close()
        return took


def main(rounds: int) -> int:
    with stack.on_docker(through_proxy=False) as made:
        created = made.admin.create(command=["sleep", "100000"], gpus={"count": 0}, cpus=1, memory_mib=256)
        running = made.admin.wait(created["id"], "running")
        sides = Product(made, running["id"]), Direct(made, running["container_id"])
        seconds: dict[str, tuple[list[float], list[float]]] = {}
        for number in range(rounds + 1):
            for kind in ("runs_true", "downloads", "uploads"):
                for side in (0, 1) if number % 2 else (1, 0):
                    took = _timed(getattr(sides[side], kind))
                    if number:  # the first round warms both sides
                        seconds.setdefault(kind, ([], []))[side].append(took)
        keys = [sides[side].echoes() for side in (0, 1)]
    return report(seconds, keys)


def report(seconds: dict[str, tuple[list[float], list[float]]], keys: list[list[float]]) -> int:
    passed = []
    for kind in ("downloads", "uploads"):
        product, direct = (SIZE / MIB / median(side) for side in seconds[kind])
        print(f"{kind}: {product:.0f} MiB/s through Mooring, {direct:.0f} MiB/s through the SDK")
        bound = min(100, 0.6 * direct)
        passed.append(verdict(kind, product, round(bound), " MiB/s", at_least=True))
    true, direct_true = (median(side) * 1e3 for side in seconds["runs_true"])
    print(f"`true`: {true:.0f} ms through Mooring, {direct_true:.0f} ms through the SDK")
    passed.append(verdict("`true`, longer than through the SDK", true - direct_true, 60, " ms"))
    echo, direct_echo = (percentile(side, 0.95) * 1e3 for side in keys)
    print(f"keystroke p95: {echo:.1f} ms through Mooring, {direct_echo:.1f} ms through the SDK")
    passed.append(verdict("keystroke p95, longer than through the SDK", echo - direct_echo, 25, " ms"))
    return 0 if all(passed) else 1


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
