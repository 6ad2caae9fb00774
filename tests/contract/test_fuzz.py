"""Ten thousand requests that are almost right: each is answered or hung up on, and nothing breaks."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.fuzz import Fuzzer
from tests.nodes import WireNode
from tests.problems import MEMBERS
from tests.service import ADMIN_KEY, Client, running, settings_for

# On each of two databases.
REQUESTS = int(os.environ.get("CONTRACT_REQUESTS", "5000"))
SEED = int(os.environ.get("CONTRACT_SEED", "20261121"))
CALLERS = 8
HANG_S = 5.0
# How long bytes that may be half a request are given before the caller says that no more will come.
PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: httpx.Headers
    body: bytes


class Caller:
    """Sends raw bytes and reads what comes back, over a connection that is kept while it can be."""

    def __init__(self, url: str) -> None:
        address = httpx.URL(url)
        self._address = (address.host, address.port)
        self._connection: socket.socket | None = None

    def send(self, raw: bytes, *, whole: bool) -> Answer | None:
        """The first answer; None where the connection was closed without one."""
        try:
            return self._send(raw, whole=whole)
        except (ConnectionError, EOFError):
            self.close()
            return None

    def _send(self, raw: bytes, *, whole: bool) -> Answer | None:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, timeout=HANG_S)
        connection = self._connection
        connection.settimeout(HANG_S)
        connection.sendall(raw)
        if not whole:
            self._connection = None
            with connection:
                _say_that_is_all(connection)
                return _first_answer(connection)
        answer = _first_answer(connection)
        if answer is None or "content-length" not in answer.headers or answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _say_that_is_all(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_S)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(HANG_S)


def _first_answer(connection: socket.socket) -> Answer | None:
    """Raises TimeoutError where nothing comes, EOFError for half an answer."""
    received = _until(connection, b"", b"\r\n\r\n")
    while received.startswith(b"HTTP/1.1 100"):
        received = _until(connection, received.partition(b"\r\n\r\n")[2], b"\r\n\r\n")
    if not received:
        return None
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = httpx.Headers([tuple(line.split(": ", 1)) for line in lines])  # type: ignore[misc]
    length = int(headers.get("content-length", "0"))
    while len(body) < length:
        more = connection.recv(65_536)
        if not more:
            break  # of HEAD, the length alone is told
        body += more
    return Answer(int(first.split()[1]), headers, body[:length])


def _until(connection: socket.socket, received: bytes, end: bytes) -> bytes:
    while end not in received:
        more = connection.recv(65_536)
        if not more:
            if received:
                raise EOFError(received)
            return b""
        received += more
    return received
