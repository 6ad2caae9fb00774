"""Connections to PostgreSQL on which no call waits without end.

PostgreSQL ends a statement after STATEMENT_TIMEOUT_S. It cannot do so while it is frozen or unreachable:

    packets are lost            the kernel ends the connection after about TCP_TIMEOUT_S
    the server does not answer  `Availability`, set by the listener (notifications.py), ends all waiting calls
    neither is detected         a call ends after CALL_TIMEOUT_S

A call that ends this way closes its connection. Whether a commit among these calls took effect is unknown.
"""

import math
import re
import select
import time
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import _WaitTimeout  # the only exception of `wait` for its `timeout`
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DisconnectionError

STATEMENT_TIMEOUT_S: Final = 15
LOCK_TIMEOUT_S: Final = 10
# The server ends the transaction of a process that hangs, which would hold back all later events.
IDLE_TIMEOUT_S: Final = 15
CONNECT_TIMEOUT_S: Final = 3
TCP_TIMEOUT_S: Final = 5
CALL_TIMEOUT_S: Final = STATEMENT_TIMEOUT_S + 5.0
POOL_TIMEOUT_S: Final = 3
_CHECK_EVERY_S: Final = 0.25
_SEVERAL_HOSTS: Final = re.compile(r"(postgres[^/]*://(?:[^@/]*@)?)([^/?@]*,[^/?@]*)(.*)")

Result = TypeVar("Result")


class Availability:
    """Whether PostgreSQL answers, as far as is known. While it does not, calls fail within 0.5 s.

    Without a listener, as in a command of the CLI, it always counts as available.

    Attributes:
        answered_at: the monotonic time of the last answer to any call of the engine's connections.
    """

    def __init__(self) -> None:
        self.is_down = False
        self.answered_at = -math.inf

    def require(self) -> None:
        """Raises psycopg.OperationalError: PostgreSQL does not answer."""
        if self.is_down:
            raise psycopg.OperationalError("PostgreSQL does not answer")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose calls fail when the server does not answer.

    Attributes:
        call_timeout_s: how long a call may wait.
        availability: ends the calls that wait.
    """

    call_timeout_s: float = CALL_TIMEOUT_S
    availability: Availability = Availability()

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        """As in psycopg. If the server does not answer, close the connection and raise OperationalError."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            first = next(gen)
        except StopIteration as done:
            result: Result = done.value  # the server was not asked, such as for set_isolation_level
            return result
        try:
            return self._bounded(_resumed(first, gen), interval)
        finally:
            # Unfinished after a failed call. That of a pipeline sends something at its end, which fails too.
            with suppress(psycopg.Error):
                gen.close()

    def _bounded(self, gen: PQGen[Result], interval: float) -> Result:
        until = time.monotonic() + self.call_timeout_s
        while True:
            # Decided before the wait: an answer that came while this process stood still is read first.
            is_last = time.monotonic() >= until or self.availability.is_down
            try:
                answer = super().wait(gen, interval, _CHECK_EVERY_S)
            except _WaitTimeout:
                if is_last:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("PostgreSQL did not answer in time") from None
            else:
                self.availability.answered_at = time.monotonic()
                return answer


class _ServerCursor(psycopg.ServerCursor[Any]):
    """A cursor of the server, for large results."""

    def __del__(self, *warn: Any) -> None:
        """As in psycopg, warn of an open cursor, unless its connection was lost: nothing is left to close.

        SQLAlchemy does not close the cursors of such a connection.
        """
        if not self.connection.closed:
            super().__del__(*warn)


def _resumed(first: Any, gen: PQGen[Result]) -> PQGen[Result]:
    """The generator from its first step on."""
    step = first
    try:
        while True:
            step = gen.send((yield step))
    except StopIteration as done:
        result: Result = done.value
        return result


def url_of_several_hosts(url: str) -> URL | None:
    """`postgresql://user@a:5432,b:5433/name`, as libpq accepts it, in SQLAlchemy's form; None: one host."""
    found = _SEVERAL_HOSTS.fullmatch(url)
    if found is None:
        return None
    begin, listed, end = found.groups()
    hosts, ports = zip(*map(_host_and_port, listed.split(",")), strict=True)
    return make_url(begin + end).update_query_dict({"host": ",".join(hosts), "port": ",".join(ports)})


def _host_and_port(listed: str) -> tuple[str, str]:
    if listed.endswith("]") or ":" not in listed:
        return listed.strip("[]"), ""
    host, _, port = listed.rpartition(":")
    return host.strip("[]"), port


def libpq_parameters(url: URL) -> dict[str, Any]:
    """The parameters of libpq in a URL."""
    return dict(url.get_dialect()().create_connect_args(url)[1])


def connection_parameters() -> dict[str, Any]:
    """Parameters of libpq that every connection of the server needs."""
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "tcp_user_timeout": TCP_TIMEOUT_S * 1000,  # ms
        "keepalives_idle": TCP_TIMEOUT_S,
        "keepalives_interval": 1,
        "keepalives_count": 5,
    }


def new_engine(url: URL, pool_size: int, availability: Availability) -> Engine:
    timeouts = (
        f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c lock_timeout={LOCK_TIMEOUT_S}s "
        f"-c idle_in_transaction_session_timeout={IDLE_TIMEOUT_S}s"
    )
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=POOL_TIMEOUT_S,
        hide_parameters=True,  # errors are logged, and values may hold env or command output
        connect_args={**connection_parameters(), "options": f"{timeouts} -c timezone=UTC"},
    )

    def connect(_dialect: object, _record: object, args: list[Any], parameters: dict[str, Any]) -> object:
        availability.require()
        connection = BoundedConnection.connect(*args, **parameters)
        connection.availability = availability
        connection.server_cursor_factory = _ServerCursor
        return connection

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "checkout", _require_open)
    return engine


def _require_open(connection: Any, _record: object, _proxy: object) -> None:
    """Replace a pooled connection that the server has closed. A ping would cost a round trip each time."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    # Nothing was asked, so the only thing to read is the end of the connection.
    if poll.poll(0):
        raise DisconnectionError
