"""Connects to a TCP port inside a container's own network namespace.

So it also reaches programs that listen on 127.0.0.1 there, as notebooks do, and never a port of the node or
of another container. A socket stays in the namespace in which it was created, so only its creation needs a
thread that has entered the namespace.
"""

import asyncio
import ctypes
import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import processes
from mooring.agent.docker.streams.engine_streams import Document, EngineApi
from mooring.agent.runtime import StreamRefused
from mooring.schemas.agent_streams import DialRequest, StreamStatus, WindowSize
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel

CONNECT_WITHIN_S: Final = 5.0  # for each address
_CLONE_NEWNET: Final = 0x40000000
_LOOPBACKS: Final = ("127.0.0.1", "::1")


class PortStream:
    """A ContainerStream of a connection. Each direction ends by itself; the stream ends with both.

    Directly on the socket: a transport of asyncio drops what it has received when a write fails or the
    program resets the connection, as servers do that answer before they have read the whole request.

    Args:
        connection: connected, and non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._input_ended = asyncio.Event()
        self._output_ended = False
        self._was_reset = False

    async def read(self) -> tuple[Channel, bytes] | None:
        if self._output_ended:
            await self._input_ended.wait()
            return None
        try:
            data = await self._loop.sock_recv(self._connection, MAX_DATA_BYTES)
        except OSError:
            self._was_reset = True
            return None
        if data:
            return Channel.STDOUT, data
        self._output_ended = True
        return Channel.CLOSE, bytes([Channel.STDOUT])

    async def write(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._connection, data)
        except OSError:
            self._input_ended.set()

    async def end_input(self) -> None:
        with suppress(OSError):  # the connection is lost already
            self._connection.shutdown(socket.SHUT_WR)
        self._input_ended.set()

    async def resize(self, window: WindowSize) -> None:
        """A connection has no window."""

    async def signal(self, name: str) -> None: ...

    async def status(self) -> StreamStatus:
        if self._was_reset:
            # The user must not take what has arrived for all that the program wanted to send.
            return StreamStatus.of_error("connection_reset", "the program has reset the connection")
        return StreamStatus()

    async def close(self) -> None:
        if self._connection.fileno() >= 0:
            # A read or write may still wait; the number of the socket is reused at once.
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
        self._connection.close()


async def open_port(engine: EngineApi, container_id: str, request: DialRequest) -> PortStream:
    """Connect to the port: on 127.0.0.1 first, then on ::1 and the container's own addresses.

    Raises:
        StreamRefused: nothing listens there, the container does not run, or its network cannot be entered.
        RuntimeUnavailable: the engine does not answer.
    """
    try:
        container = await engine.request("GET", f"/containers/{container_id}/json")
    except EngineRefused as refused:
        if refused.status != 404:
            raise
        raise _not_running() from refused
    pid = int(container["State"]["Pid"])
    if not pid:
        raise _not_running()
    if _is_shared(str(container["HostConfig"]["NetworkMode"])):
        raise _not_supported("the instance uses the node's own network; connect to the node instead")
    for address in _addresses(container):
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_WITHIN_S):
                return await _connected(address, request.port, pid, container_id)
    raise StreamRefused(
        "port_not_listening", f"no program in the instance accepts connections on TCP port {request.port}"
    )


def _not_running() -> StreamRefused:
    return StreamRefused("not_running", "the instance is not running; start it first")


def _is_shared(network_mode: str) -> bool:
    """Whether the network is that of the node or of another container."""
    return network_mode == "host" or network_mode.startswith("container:")


def _addresses(container: Document) -> Iterator[str]:
    yield from _LOOPBACKS
    for network in container["NetworkSettings"]["Networks"].values():
        yield from (address for key in ("IPAddress", "GlobalIPv6Address") if (address := network.get(key)))


async def _connected(address: str, port: int, pid: int, container_id: str) -> PortStream:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = await asyncio.to_thread(_socket_in, family, pid, container_id)
    try:
        made.settimeout(0)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
        return PortStream(made)
    except BaseException:
        made.close()
        raise


def _socket_in(family: int, pid: int, container_id: str) -> socket.socket:
    """Create a TCP socket in the network namespace of a process of the container.

    Raises:
        StreamRefused: the process has ended, or its namespace cannot be entered.
        OSError: the socket cannot be created.
    """
    made: list[socket.socket | Exception] = []

    def create() -> None:
        try:
            _enter_namespace(pid, container_id)
            made.append(socket.socket(family, socket.SOCK_STREAM))
        except Exception as error:
            made.append(error)

    # The thread ends afterwards: it must not return to a pool, since it stays in the namespace.
    thread = threading.Thread(target=create, name="namespace")
    thread.start()
    thread.join()
    [result] = made
    if isinstance(result, Exception):
        raise result
    return result


def _enter_namespace(pid: int, container_id: str) -> None:
    try:
        descriptor = os.open(processes.PROC / str(pid) / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _not_running() from None
    except PermissionError:
        raise _not_supported("the node's agent may not enter the networks of containers") from None
    try:
        # Checked after the namespace is open: the pid may have been reused before.
        if not processes.is_in(pid, container_id):
            raise _not_supported("the node's agent does not see the processes of containers")
        _setns(descriptor)
    finally:
        os.close(descriptor)


def _setns(descriptor: int) -> None:
    # `os.setns` exists from Python 3.12 on.
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        if number == errno.EPERM:
            raise _not_supported("the node's agent may not enter the networks of containers")
        raise OSError(number, os.strerror(number))


def _not_supported(message: str) -> StreamRefused:
    return StreamRefused("not_supported", message)
