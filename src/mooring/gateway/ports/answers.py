"""Answers of the proxy itself: small texts, which say what to do."""

from typing import Final

import h11

from mooring_client.errors import (
    Conflict,
    MooringError,
    NotRunning,
    PortNotListening,
    Unauthorized,
)

Head = list[tuple[bytes, bytes]]

_TEXT: Final[Head] = [
    (b"Content-Type", b"text/plain; charset=utf-8"),
    (b"Cache-Control", b"no-store"),
    (b"X-Content-Type-Options", b"nosniff"),
]


def status_of(error: MooringError) -> int:
    """The status for a client that talks to a program: a conflict would be the program's answer."""
    match error:
        case NotRunning():
            return 503
        case PortNotListening():
            return 502
        case Conflict() if type(error) is not Conflict:
            return 502
        case _:
            return error.status


def of_error(error: MooringError) -> tuple[int, Head, bytes]:
    """Status, head and body. The body repeats nothing of the request, except what is no HTML."""
    body = f"{error.code}: {error.message}\n".encode()
    head: Head = [*_TEXT, (b"Content-Length", str(len(body)).encode())]
    if isinstance(error, Unauthorized):
        head.append((b"WWW-Authenticate", b'Bearer realm="mooring"'))
    if error.retry_after_s is not None:
        head.append((b"Retry-After", str(error.retry_after_s).encode()))
    return status_of(error), head, body


def redirect(location: bytes, cookie: bytes | None, status: int) -> tuple[int, Head, bytes]:
    """To the same host; the next request must not have the token as its Referer."""
    head: Head = [
        (b"Location", location),
        (b"Cache-Control", b"no-store"),
        (b"Referrer-Policy", b"no-referrer"),
        (b"Content-Length", b"0"),
    ]
    if cookie is not None:
        head.append((b"Set-Cookie", cookie))
    return status, head, b""


def sent(server: h11.Connection, answer: tuple[int, Head, bytes], *, is_head: bool, closes: bool) -> bytes:
    """The bytes of an answer."""
    status, head, body = answer
    if closes:
        head = [*head, (b"Connection", b"close")]
    parts = [server.send(h11.Response(status_code=status, headers=head))]
    if body and not is_head:
        parts.append(server.send(h11.Data(data=body)))
    parts.append(server.send(h11.EndOfMessage()))
    return b"".join(part or b"" for part in parts)
