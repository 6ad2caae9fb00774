"""One pool of connections to the engine's unix socket, in place of the library's own.

Docker's library keeps a pool per URL, so that every container's every call opens a connection of its own,
and it forgets to close the socket when nobody listens.
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
def connection_told_to(listener: Callable[[Any], None]) -> Iterator[None]:
    """Call `listener` with each connection that this thread begins to use within the block.

    So another thread can cut a request off that waits for the engine's headers, as a pull does while its
    registry says nothing. What the listener raises ends the request.
    """
    _local.listener = listener
    try:
        yield
    finally:
        del _local.listener


def _tell(connection: Any) -> None:
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
        _tell(self)


class _Pool(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:  # the stubs want more of a connection than the library does
        return _Connection("http://localhost", self.socket_path)

    def _make_request(self, conn: Any, *arguments: Any, **options: Any) -> Any:
        if conn.sock is not None:
            _tell(conn)
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
    """Has a client that talks to a unix socket do so over one pool; TCP and SSH stay the library's."""
    adapter = client.get_adapter(client.base_url)
    if isinstance(adapter, UnixHTTPAdapter):
        client.mount("http+docker://", _Adapter(adapter.socket_path, timeout_s, pool_size))
        adapter.close()
