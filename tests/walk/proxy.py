"""A proxy between an agent and Docker, so that a test can act in the middle of a call."""

import itertools
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.testbed.dockerd import DockerNode

Action = Callable[[], None]
_CHUNK = 65_536
_NUMBERS = itertools.count(1)


class EngineProxy:
    """A Unix socket that forwards calls to dockerd. A test can run an action before or after one of them."""

    def __init__(self, node: DockerNode) -> None:
        self._node = node
        self._path = node.folder / f"proxy-{next(_NUMBERS)}.sock"
        self.url = f"unix://{self._path}"
        self._before: tuple[re.Pattern[bytes], Action] | None = None
        self._after: tuple[re.Pattern[bytes], Action] | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def before_next(self, call: str, action: Action) -> None:
        """Run `action` just before the next matching call is forwarded to Docker."""
        self._before = (re.compile(call.encode()), action)

    def after_next(self, call: str, action: Action) -> None:
        """Run `action` after Docker has executed the next matching call, before the agent gets the answer."""
        self._after = (re.compile(call.encode()), action)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(_Pair(self, client).run)

    def _start(self, target: Action) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def _before_request(self, request: bytes) -> Action | None:
        """Run the action before a request. Return the action to run before its answer is forwarded."""
        before = self._take("_before", request)
        if before is not None:
            before()
        return self._take("_after", request)

    def _take(self, name: str, request: bytes) -> Action | None:
        with self._lock:
            wanted: tuple[re.Pattern[bytes], Action] | None = getattr(self, name)
            if wanted is None or not wanted[0].match(request):
                return None
            setattr(self, name, None)
            return wanted[1]


class _Pair:
    """A connection of the agent and its counterpart to Docker."""

    def __init__(self, proxy: EngineProxy, client: socket.socket) -> None:
        self._proxy, self._client = proxy, client
        self._before_answer: Action | None = None

    def run(self) -> None:
        with self._client, socket.socket(socket.AF_UNIX) as engine:
            with self._proxy._lock:
                self._proxy._open |= {self._client, engine}
            try:
                engine.connect(str(self._proxy._node.socket))
                back = threading.Thread(target=self._answers, args=[engine], daemon=True)
                back.start()
                self._requests(engine)
                back.join()
            except OSError:
                pass  # one side closed: close both
            finally:
                with self._proxy._lock:
                    self._proxy._open -= {self._client, engine}

    def _requests(self, engine: socket.socket) -> None:
        with suppress(OSError):
            while chunk := self._client.recv(_CHUNK):
                self._before_answer = self._proxy._before_request(chunk) or self._before_answer
                engine.sendall(chunk)
        with suppress(OSError):
            engine.shutdown(socket.SHUT_WR)

    def _answers(self, engine: socket.socket) -> None:
        with suppress(OSError):
            while chunk := engine.recv(_CHUNK):
                action, self._before_answer = self._before_answer, None
                if action is not None:
                    action()
                self._client.sendall(chunk)
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
