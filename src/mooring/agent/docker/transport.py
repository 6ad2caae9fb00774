"""One pool of connections to the engine's unix socket, instead of those of Docker's library.

The library has one pool per URL, so each call of each container opens a new connection. It also leaves the
socket open if the engine does not listen.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from docker import APIClient
from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool

_local = threading.local()


@contextmanager
def listening_to_connections(listener: Callable[[Any], None]) -> Iterator[None]:
    """Call `listener` with each connection that this thread uses within the block.

    With the connection, another thread can end a request that waits for the engine's headers, such as a pull
    whose registry does not answer. An exception of the listener ends the request.
    """
    _local.listener = listener
    try:
        yield
    finally:
        del _local.listener


def _call_listener(connection: Any) -> None:
    if (listener := getattr(_local, "listener", None)) is not None:
        listener(connection)


class _Connection(UnixHTTPConnection):
    def connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self.timeout)
            made.connect(self.unix_socket)
        except OSError:
            made.close()
            raise
        self.sock = made
        _call_listener(self)


class _Pool(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:  # the stubs require more of a connection than the library does
        return _Connection("http://localhost", self.socket_path)

    def _make_request(self, conn: Any, *arguments: Any, **options: Any) -> Any:
        if conn.sock is not None:
            _call_listener(conn)
        return super()._make_request(conn, *arguments, **options)


class _Adapter(UnixHTTPAdapter):
    def __init__(self, socket_path: str, timeout_s: int, pool_size: int) -> None:
        super().__init__(f"http+unix://{socket_path}", timeout_s, max_pool_size=pool_size)
        self._pool = _Pool("http://localhost", socket_path, timeout_s, pool_size)

    def get_connection(self, url: bytes | str, proxies: object = None) -> _Pool:
        return self._pool

    def close(self) -> None:
        super().close()
        self._pool.close()


def share_connections(client: APIClient, timeout_s: int, pool_size: int) -> None:
    """Make a client use one pool for its unix socket. TCP and SSH are left to the library."""
    adapter = client.get_adapter(client.base_url)
    if isinstance(adapter, UnixHTTPAdapter):
        client.mount("http+docker://", _Adapter(adapter.socket_path, timeout_s, pool_size))
        adapter.close()
