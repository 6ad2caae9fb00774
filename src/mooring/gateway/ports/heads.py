"""Heads of requests and answers: what is strict about them, and which fields pass in which direction.

h11 parses them. It accepts folded lines and single line feeds, about which servers disagree, so they are
rejected before.
"""

import asyncio
import re
from collections.abc import Collection, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final

from mooring_client.errors import HeadersTooLarge, MalformedRequest, RequestTimeout

MAX_HEAD_BYTES: Final = 64 * 1024
READ_BYTES: Final = 64 * 1024
_MAX_LENGTH_DIGITS: Final = 18

Fields = Sequence[tuple[bytes, bytes]]
Network = IPv4Network | IPv6Network

_END: Final = b"\r\n\r\n"
# A line feed alone, a carriage return alone, a NUL, or a line that continues the one before.
_LENIENT: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)|\x00|\r\n[ \t]")
# RFC 9110, section 7.6.1: fields of one connection. Proxy-Authorization is for a proxy, so for no program.
_HOP_BY_HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
# What a client must not claim about itself.
_FORWARDED: Final = frozenset({
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port",
    b"x-forwarded-prefix", b"x-forwarded-server", b"x-forwarded-ssl", b"x-real-ip", b"via",
})  # fmt: skip
_SPELLED_OTHERWISE: Final = _HOP_BY_HOP | _FORWARDED | {b"content-length", b"host", b"authorization"}


async def read_head(reader: asyncio.StreamReader, begun: bytes, idle_s: float, head_s: float) -> bytes | None:
    """Read until a head is complete, and return it with what follows; None: the client has ended, or is idle.

    Args:
        begun: what was read before.
        idle_s: how long a client may send nothing.
        head_s: how long a head may take from its first byte.

    Raises:
        HeadersTooLarge, RequestTimeout.
        MalformedRequest: the head is one about which servers may disagree.
    """
    received = begun
    if not received:
        try:
            async with asyncio.timeout(idle_s):
                received = await reader.read(READ_BYTES)
        except TimeoutError:
            return None
        if not received:
            return None
    at = received.find(_END)
    if at < 0:
        received, at = await _rest_of_head(reader, received, head_s)
        if at < 0:
            return None
    if at > MAX_HEAD_BYTES:
        raise HeadersTooLarge(f"path and headers may have {MAX_HEAD_BYTES} bytes together at most")
    if _LENIENT.search(received, 0, at):
        raise MalformedRequest("the request's head has folded lines or single line feeds")
    return received


async def _rest_of_head(reader: asyncio.StreamReader, received: bytes, head_s: float) -> tuple[bytes, int]:
    """The head and the position of its end; -1: the client has ended."""
    searched = 0
    try:
        async with asyncio.timeout(head_s):
            while (at := received.find(_END, max(0, searched - 3))) < 0:
                searched = len(received)
                if searched > MAX_HEAD_BYTES:
                    raise HeadersTooLarge(
                        f"path and headers may have {MAX_HEAD_BYTES} bytes together at most"
                    )
                more = await reader.read(READ_BYTES)
                if not more:
                    return received, -1
                received += more
            return received, at
    except TimeoutError:
        raise RequestTimeout("the request's head did not arrive in time") from None


def value_of(fields: Fields, name: bytes) -> bytes | None:
    """The first value of a field."""
    for key, value in fields:
        if key == name:
            return value
    return None


def values_of(fields: Fields, name: bytes) -> list[bytes]:
    return [value for key, value in fields if key == name]


def tokens_of(fields: Fields, name: bytes) -> list[bytes]:
    """The members of a field that is a list, in lower case."""
    return [
        token
        for value in values_of(fields, name)
        for part in value.split(b",")
        if (token := part.strip().lower())
    ]


def require_one_framing(fields: Fields) -> None:
    """Raises MalformedRequest: two servers could disagree where the body ends (request smuggling)."""
    if value_of(fields, b"transfer-encoding") is not None and value_of(fields, b"content-length") is not None:
        raise MalformedRequest("send either Content-Length or Transfer-Encoding, not both")
    lengths = values_of(fields, b"content-length")
    if len(lengths) > 1 or any(len(each) > _MAX_LENGTH_DIGITS for each in lengths):
        raise MalformedRequest("send one Content-Length, of a size that is possible")
    if len(values_of(fields, b"host")) != 1:
        raise MalformedRequest("send exactly one Host header")


def has_body(fields: Fields) -> bool:
    """Whether a request has a body."""
    length = value_of(fields, b"content-length")
    return value_of(fields, b"transfer-encoding") is not None or (length is not None and int(length) > 0)


def upgrade_of(method: bytes, fields: Fields) -> bytes | None:
    """The protocol that a request wants to switch to; None: none that is supported."""
    protocols = tokens_of(fields, b"upgrade")
    if not protocols or b"upgrade" not in tokens_of(fields, b"connection"):
        return None
    if method != b"GET" or has_body(fields):
        return None
    # HTTP/2 would hide the requests on the connection from this proxy.
    return protocols[0] if len(protocols) == 1 and protocols[0] != b"h2c" else None


def end_to_end(fields: Fields, without: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The fields that pass a proxy."""
    dropped = _HOP_BY_HOP.union(tokens_of(fields, b"connection"), without) - {b"host", b"content-length"}
    return [
        (name, value)
        for name, value in fields
        # Programs behind CGI or WSGI take `x_real_ip` for `x-real-ip`.
        if name not in dropped and (b"_" not in name or name.replace(b"_", b"-") not in _SPELLED_OTHERWISE)
    ]


def for_program(
    fields: Fields, *, address: str, host: bytes, scheme: str, prefix: str
) -> list[tuple[bytes, bytes]]:
    """The fields that the program gets, with what this proxy knows of the client.

    Args:
        address: of the client; with those of the proxies in front, separated by commas.
        prefix: of the path that the program does not see.
    """
    # This proxy lets the client send its body at once, so that the program need not.
    passed = end_to_end(fields, _FORWARDED | {b"expect"})
    passed += [
        (b"x-forwarded-for", address.encode()),
        (b"x-forwarded-host", host),
        (b"x-forwarded-proto", scheme.encode()),
    ]
    if prefix:
        passed.append((b"x-forwarded-prefix", prefix.encode()))
    return passed


def client_addresses(peer: str, fields: Fields, trusted: Sequence[Network]) -> tuple[str, str]:
    """The client's own address, and the value of X-Forwarded-For for the program.

    Args:
        trusted: networks of the proxies in front, whose X-Forwarded-For is believed.
    """
    if not trusted:
        return peer, peer
    hops = [each.decode("latin-1") for each in tokens_of(fields, b"x-forwarded-for")]
    client, known = peer, [peer]
    for hop in [*reversed(hops), None]:
        if hop is None or not _is_in(client, trusted):
            break
        if not _is_address(hop):
            break
        client = hop
        known.append(hop)
    return client, ", ".join(reversed(known))


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return any(ip in network for network in networks)
