"""SQLite: commits of one process wake the waiters of the others, as PostgreSQL's NOTIFY does.

    mooring.db.listeners/<random>    a datagram socket of each listening process

A message is a list of topics. A lost one costs only time, because waiters also poll.
"""

import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from mooring.db.file_lock import beside, give_owner_of
from mooring.db.signals import AnyTopic, ObjectTopic, Signals

FOLDER_SUFFIX: Final = ".listeners"
_SEPARATOR: Final = "\n"
# Larger than the longest list in practice. Instead of a longer one, the message for every topic is sent.
_MAX_BYTES: Final = 64 * 1024
_EVERY_TOPIC: Final = b""
# The kernel's limit is 108 bytes.
_MAX_ADDRESS: Final = 100


class FileNotifications:
    """The sockets of the processes that use one database file.

    Args:
        database: the file.
    """

    def __init__(self, database: Path) -> None:
        self._folder = beside(database, FOLDER_SUFFIX)
        self._own: str | None = None

    def bind(self) -> socket.socket:
        """Make this process's socket. `send` leaves it out.

        Raises:
            OSError: cannot create the socket.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        give_owner_of(self._folder.parent, self._folder)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = token_hex(8)
        try:
            with _address(self._folder, name) as address:
                made.bind(address)
            give_owner_of(self._folder, self._folder / name)
        except BaseException:
            made.close()
            raise
        self._own = name
        return made

    def unbind(self) -> None:
        if self._own is not None:
            (self._folder / self._own).unlink(missing_ok=True)

    def send(self, topics: Collection[AnyTopic]) -> None:
        """Send the topics to all other processes that listen. Raises nothing: the commit has succeeded."""
        message = _SEPARATOR.join(topics).encode()
        if len(message) > _MAX_BYTES:
            message = _EVERY_TOPIC
        for name in self._others():
            with suppress(OSError):  # it has just ended, or it is so busy that its buffer is full
                self._send(name, message)

    def _others(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name != self._own]  # noqa: PTH208  # faster
        except OSError:
            return []  # no process listens

    def _send(self, name: str, message: bytes) -> None:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
            _address(self._folder, name) as address,
        ):
            sender.settimeout(0)
            try:
                sender.sendto(message, address)
            except ConnectionRefusedError:
                (self._folder / name).unlink(missing_ok=True)  # left by a process that was killed


class FileListener:
    """A thread that passes notifications of other processes to this one's waiters."""

    def __init__(self, notifications: FileNotifications, signals: Signals) -> None:
        self._notifications, self._signals = notifications, signals
        self._receiver: socket.socket | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)

    def start(self) -> None:
        """Raises OSError: cannot create the socket."""
        self._receiver = self._notifications.bind()
        self._thread.start()

    def stop(self) -> None:
        if self._receiver is not None:
            self._stopping = True
            self._receiver.shutdown(socket.SHUT_RDWR)  # `recv` returns
            self._thread.join(timeout=5)
            self._notifications.unbind()

    def _run(self) -> None:
        assert self._receiver is not None  # see `start`
        with closing(self._receiver) as receiver:
            self._signals.fire_all()  # what was sent before the socket existed is lost
            while (message := receiver.recv(_MAX_BYTES)) or not self._stopping:
                if message == _EVERY_TOPIC:
                    self._signals.fire_all()
                else:
                    self._signals.fire(map(ObjectTopic, message.decode().split(_SEPARATOR)))


@contextmanager
def _address(folder: Path, name: str) -> Iterator[str]:
    """The address of a socket, shorter than the kernel's limit also in a folder with a long path."""
    path = str(folder / name)
    if len(os.fsencode(path)) <= _MAX_ADDRESS:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
