"""Checks that a registry is on the public internet, right before the Docker daemon connects to it.

The daemon resolves the name again, and a registry can answer the daemon differently than this check. For the
remaining risk see docs/security.md (R25); `daemon_guard` blocks the daemon from cloud metadata in any case.
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
from mooring.core.registry_hosts import Address, host_of, internal_addresses, is_internal, parse_address
from mooring_client.schemas.states import Reason

Resolve = Callable[[str, float], Collection[Address]]  # as `resolve`
Ask = Callable[[str, int, Collection[Address], float], Sequence[str]]  # as `challenges`

_HUB_HOST: Final = "registry-1.docker.io"
_HTTPS: Final = 443
_RESOLVE_TIMEOUT_S: Final = 5.0
_REQUEST_TIMEOUT_S: Final = 5.0
_MAX_HEADER_BYTES: Final = 16_384
_MAX_RESOLVING: Final = 32
_NO_ADDRESS: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
_REALM: Final = re.compile(r'realm\s*=\s*(?:"([^"]*)"|([^\s,]*))', re.IGNORECASE)
# Stricter than Go's parser: URLs that the two might parse differently are rejected.
_PLAIN_URL: Final = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]*)?")


class UnknownNameError(OSError):
    """The name does not exist, or has no address. Other failures of the resolver may pass."""


class HeadersTooLong(Exception):
    """A registry's headers exceed the limit, so a part of them would not be checked."""


_resolving = threading.BoundedSemaphore(_MAX_RESOLVING)


def resolve(host: str, within_s: float) -> Collection[Address]:
    """Return all addresses of a name. Runs in a thread, because the system's resolver has no timeout.

    Raises:
        UnknownNameError: the name has no address.
        OSError: the resolver failed, or did not answer in time.
    """
    found: list[Address] = []
    failures: list[OSError] = []
    if not _resolving.acquire(timeout=within_s):
        raise TimeoutError("too many names are being resolved")

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.extend({ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers})
        except socket.gaierror as error:
            failures.append(_unknown(host) if error.errno in _NO_ADDRESS else error)
        except UnicodeError:
            failures.append(_unknown(host))
        except OSError as error:
            failures.append(error)
        finally:
            _resolving.release()

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        raise TimeoutError(f"{host} was not resolved in time")
    if failures:
        raise failures[0]
    return found


def _unknown(host: str) -> UnknownNameError:
    return UnknownNameError(f"{host} has no address")


def challenges(host: str, port: int, addresses: Collection[Address], within_s: float) -> Sequence[str]:
    """Return the `WWW-Authenticate` headers of a registry at one of these addresses. Follows no redirect.

    Sends no secret, so the certificate is not verified.

    Raises:
        OSError: the registry does not answer in time.
        HeadersTooLong: its headers are not read completely.
    """
    deadline = time.monotonic() + within_s
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = min(addresses, key=lambda each: (each.version, each))
    with (
        socket.create_connection((str(address), port), timeout=within_s) as connection,
        context.wrap_socket(connection, server_hostname=host) as channel,
    ):
        request = f"GET /v2/ HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        channel.sendall(request.encode("ascii"))
        head = _head(channel, deadline)
    lines = head.decode("latin-1").split("\r\n")
    named = (line.partition(":") for line in lines[1:])
    return [value.strip() for name, _, value in named if name.strip().lower() == "www-authenticate"]


def _head(channel: ssl.SSLSocket, deadline: float) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > _MAX_HEADER_BYTES:
            raise HeadersTooLong
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the registry did not answer in time")
        channel.settimeout(left)
        chunk = channel.recv(4096)
        if not chunk:
            break
        head += chunk
    return head.partition(b"\r\n\r\n")[0]


class RegistryCheck:
    """Rejects pulls from registries that are not on the public internet."""

    def __init__(self, resolve: Resolve = resolve, ask: Ask = challenges) -> None:
        self._resolve, self._ask = resolve, ask

    def require_public(self, registry: str, *, proxied: bool) -> None:
        """Check the addresses of the registry and of the token server that it names.

        Args:
            registry: `host[:port]`.
            proxied: the daemon connects through a proxy, which resolves names itself.

        Raises:
            StartRefused: `registry_not_allowed`, or `image_pull_failed` for a name without addresses.
            OSError: the resolver failed, or did not answer in time.
        """
        if is_internal(registry):
            raise StartRefused(_not_allowed(registry))
        host = _HUB_HOST if registry == DOCKER_HUB else host_of(registry)
        addresses = self._public_addresses(host, registry, proxied=proxied)
        if not addresses:
            return  # only the proxy can resolve the name
        try:
            headers = self._ask(host, _port(registry), addresses, _REQUEST_TIMEOUT_S)
        except HeadersTooLong:
            raise StartRefused(_not_allowed(registry)) from None
        except (OSError, ValueError, OverflowError):
            return  # the daemon fails too, or uses a route that the agent does not have
        for realm in _realms(headers):
            self._require_public_realm(realm, registry, proxied=proxied)

    def _require_public_realm(self, realm: str, registry: str, *, proxied: bool) -> None:
        url = _PLAIN_URL.fullmatch(realm)
        if url is None or is_internal(url[1]):
            raise StartRefused(_not_allowed(registry))
        self._public_addresses(host_of(url[1]), registry, proxied=proxied)

    def _public_addresses(self, host: str, registry: str, *, proxied: bool) -> Collection[Address]:
        """Return the host's addresses, all of them public; none if only a proxy can resolve the name."""
        if (address := parse_address(host)) is not None:
            return [address]  # `is_internal` has checked it
        try:
            addresses = self._resolve(host, _RESOLVE_TIMEOUT_S)
        except OSError as error:
            if proxied:
                return []
            if isinstance(error, UnknownNameError):
                raise StartRefused(_unresolved(registry)) from None
            raise
        if internal_addresses(addresses):
            raise StartRefused(_not_allowed(registry))
        return addresses


def _port(registry: str) -> int:
    _host, _, port = registry.rpartition(":")
    return int(port) if _host and port.isdigit() else _HTTPS


def _realms(headers: Sequence[str]) -> list[str]:
    """Return the URLs of token servers. For basic authentication, the realm is only a label."""
    found = (match[1] or match[2] or "" for header in headers for match in _REALM.finditer(header))
    bearer = any("bearer" in header.lower() for header in headers)
    return [realm for realm in found if bearer and (":" in realm or "/" in realm)]


def _not_allowed(registry: str) -> Reason:
    unknown = f"{registry} or its token server is not known to be on the public internet"
    message = f"{unknown}; an admin can add the registry to MOORING_ALLOWED_REGISTRIES"
    return Reason(code="registry_not_allowed", message=message)


def _unresolved(registry: str) -> Reason:
    message = f"the node cannot resolve the registry's name {registry}; check the name"
    return Reason(code="image_pull_failed", message=message)
