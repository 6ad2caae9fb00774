"""Where a registry's names lead, looked up right before the node's Docker daemon connects there.

The daemon resolves the name again by itself, and a registry can answer the daemon otherwise than this check:
neither can be ruled out here. What remains is in docs/security.md (R25); `firewall.daemon_rules` keeps the
daemon from cloud metadata whatever it is told.
"""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address
from typing import Final

from mooring.agent.runtime import StartRefused
from mooring.core.images import DOCKER_HUB
from mooring.core.instance.state import Reason
from mooring.core.registry_hosts import Address, host_of, inside_of, is_inside, literal

Resolve = Callable[[str, float], Collection[Address]]
Ask = Callable[[str, int, Collection[Address], float], Sequence[str]]

_HUB_HOST: Final = "registry-1.docker.io"
_HTTPS: Final = 443
_RESOLVED_IN_S: Final = 5.0
_ANSWERED_IN_S: Final = 5.0
_MOST_HEADER_BYTES: Final = 16_384
_MOST_RESOLVING: Final = 32
_REALM: Final = re.compile(r'realm\s*=\s*(?:"([^"]*)"|([^\s,]*))', re.IGNORECASE)
# Stricter than Go's parser: what the two might read differently is refused.
_PLAIN_URL: Final = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]*)?")


class TooLong(Exception):
    """A registry's headers go on and on: what is at their end would not be seen."""


_resolving = threading.BoundedSemaphore(_MOST_RESOLVING)


def resolve(host: str, within_s: float) -> Collection[Address]:
    """All addresses of a name. OSError when there are none, or not in time: the resolver has no deadline."""
    found: list[Address] = []
    if not _resolving.acquire(timeout=within_s):
        raise TimeoutError("too many names are being resolved")

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.extend({ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers})
        except (OSError, UnicodeError):
            return
        finally:
            _resolving.release()

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)
    thread.start()
    thread.join(within_s)
    addresses = list(found)
    if thread.is_alive() or not addresses:
        raise OSError(f"{host} has no address")
    return addresses


def challenges(host: str, port: int, addresses: Collection[Address], within_s: float) -> Sequence[str]:
    """The `WWW-Authenticate` headers of a registry, asked at one of these addresses; no redirect is followed.

    No secret is sent, so its certificate is not looked at.

    Raises:
        OSError: it does not answer in time.
        TooLong
    """
    deadline = time.monotonic() + within_s
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = min(addresses, key=lambda each: (each.version, each))
    with (
        socket.create_connection((str(address), port), timeout=within_s) as connection,
        context.wrap_socket(connection, server_hostname=host) as channel,
    ):
        channel.sendall(
            f"GET /v2/ HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        head = _head(channel, deadline)
    lines = head.decode("latin-1").split("\r\n")
    named = (line.partition(":") for line in lines[1:])
    return [value.strip() for name, _, value in named if name.strip().lower() == "www-authenticate"]


def _head(channel: ssl.SSLSocket, deadline: float) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > _MOST_HEADER_BYTES:
            raise TooLong
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the registry takes too long")
        channel.settimeout(left)
        chunk = channel.recv(4096)
        if not chunk:
            break
        head += chunk
    return head.partition(b"\r\n\r\n")[0]


class RegistryCheck:
    """Lets pulls pass that go to the public internet, as far as the names say now."""

    def __init__(self, resolve: Resolve = resolve, ask: Ask = challenges) -> None:
        self._resolve, self._ask = resolve, ask

    def require_public(self, registry: str, *, proxied: bool) -> None:
        """Resolve the registry, and the place where it sends the daemon for a token.

        Args:
            registry: `host[:port]`.
            proxied: the daemon connects through a proxy, which resolves by itself.

        Raises:
            StartRefused: code `registry_not_allowed`, or `image_pull_failed` for a name without addresses.
        """
        if is_inside(registry):
            raise StartRefused(_not_allowed(registry))
        host = _HUB_HOST if registry == DOCKER_HUB else host_of(registry)
        addresses = self._public(host, registry, proxied=proxied)
        if not addresses:
            return
        try:
            asked = self._ask(host, _port(registry), addresses, _ANSWERED_IN_S)
        except TooLong:
            raise StartRefused(_not_allowed(registry)) from None
        except (OSError, ValueError, OverflowError):
            return  # the daemon fails likewise, or reaches it by a way that is not ours
        for realm in _realms(asked):
            self._require_public_realm(realm, registry, proxied=proxied)

    def _require_public_realm(self, realm: str, registry: str, *, proxied: bool) -> None:
        url = _PLAIN_URL.fullmatch(realm)
        if url is None or is_inside(url[1]):
            raise StartRefused(_not_allowed(registry))
        self._public(host_of(url[1]), registry, proxied=proxied)

    def _public(self, host: str, registry: str, *, proxied: bool) -> Collection[Address]:
        """The host's addresses, all of them public; none where a proxy has to find them."""
        if (address := literal(host)) is not None:
            return [address]  # public: `is_inside` has looked at it
        try:
            addresses = self._resolve(host, _RESOLVED_IN_S)
        except OSError:
            if proxied:
                return []
            raise StartRefused(_unknown(registry)) from None
        if inside_of(addresses):
            raise StartRefused(_not_allowed(registry))
        return addresses


def _port(registry: str) -> int:
    _host, _, port = registry.rpartition(":")
    return int(port) if _host and port.isdigit() else _HTTPS


def _realms(challenged: Sequence[str]) -> list[str]:
    """Those that a client is sent to; of basic authentication it is only a label."""
    found = (match[1] or match[2] or "" for header in challenged for match in _REALM.finditer(header))
    bearer = any("bearer" in header.lower() for header in challenged)
    return [realm for realm in found if bearer and (":" in realm or "/" in realm)]


def _not_allowed(registry: str) -> Reason:
    return Reason(
        code="registry_not_allowed",
        message=f"{registry} leads to addresses that are not on the public internet; an admin can add it to "
        "MOORING_ALLOWED_REGISTRIES",
    )


def _unknown(registry: str) -> Reason:
    message = f"the name of the registry {registry} could not be resolved on the node; check it"
    return Reason(code="image_pull_failed", message=message)
