"""Requests of webhooks: each with its own connection, to an address that is allowed (R25)."""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from socket import SOCK_STREAM, gaierror
from typing import Final

import httpcore
import httpx

from mooring import __version__
from mooring.core import webhooks
from mooring.core.registry_hosts import Address
from mooring.core.webhooks import AddressRules, HttpTarget

TIMEOUT_S: Final = 10.0
# Of several addresses, one that does not answer must leave time for another one.
_CONNECT_S: Final = 4.0
# Only the status counts. The body is read to let the receiver end its answer.
_MAX_ANSWER_BYTES: Final = 64 * 1024
_ANSWER_S: Final = 1.0
# A name that is being resolved occupies a thread until the name server answers, also after its attempt.
# So a tenant whose name servers hang has no more threads than this.
RESOLVING_PER_HOLDER: Final = 32

Headers = Mapping[bytes | str, bytes | str]
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


class NotSent(Exception):
    """There is no answer. The message is one of the codes in docs/errors.md."""


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """The status of an answer, and the seconds of its Retry-After."""

    code: int
    retry_after_s: float | None


async def resolve(host: str, port: int) -> Sequence[Address]:
    """The addresses of a name, by the resolver of this machine. Raises OSError: it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
    return [ip_address(address[0]) for *_, address in found]


class RequestSender:
    """Sends requests without a proxy, and follows no redirects.

    Args:
        resolve: called once for each request, whose connection goes to one of these addresses.
    """

    def __init__(self, rules: AddressRules, resolve: Resolve = resolve) -> None:
        self._rules, self._resolve = rules, resolve
        self._resolving: Counter[str] = Counter()
        self._tls = httpx.create_ssl_context()

    async def send(
        self, url: str, message_id: str, secrets: Iterable[str], body: bytes, holder: str
    ) -> ReceiverAnswer:
        """Post a body with its signature.

        Args:
            holder: the tenant, whose names share RESOLVING_PER_HOLDER.

        Raises:
            NotSent: there is no answer, or no request was sent.
        """
        target = webhooks.parse_target(url)
        timestamp = int(time.time())
        headers: Headers = {
            "host": target.authority,
            "content-type": "application/json",
            "user-agent": f"Mooring/{__version__}",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": webhooks.signature(secrets, message_id, timestamp, body),
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                addresses = await self._addresses(target, holder)
                return await self._post(target, addresses, headers, body)
        except TimeoutError:
            raise NotSent("timeout") from None
        except httpcore.TimeoutException:
            raise NotSent("timeout") from None
        except httpcore.NetworkError as error:
            raise NotSent("tls_failed" if _is_of_tls(error) else "connection_failed") from None
        except httpcore.ProtocolError:
            raise NotSent("bad_answer") from None

    async def _addresses(self, target: HttpTarget, holder: str) -> Sequence[Address]:
        try:
            found = await self._resolved(target, holder)
        except (gaierror, UnicodeError):
            raise NotSent("name_not_resolved") from None
        allowed = [each for each in found if self._rules.allows(each, secure=target.secure)]
        if not allowed:
            raise NotSent("address_not_allowed")
        return allowed

    async def _resolved(self, target: HttpTarget, holder: str) -> Sequence[Address]:
        if self._resolving[holder] >= RESOLVING_PER_HOLDER:
            raise NotSent("name_not_resolved")
        self._resolving[holder] += 1

        def ended(task: "asyncio.Future[Sequence[Address]]") -> None:
            self._resolving[holder] -= 1
            if not task.cancelled():
                task.exception()  # nobody may wait for it any more

        resolving = asyncio.ensure_future(self._resolve(target.host, target.port))
        resolving.add_done_callback(ended)
        # It goes on when the attempt has ended, as its thread does.
        return await asyncio.shield(resolving)

    async def _post(
        self,
        target: HttpTarget,
        addresses: Sequence[Address],
        headers: Mapping[bytes | str, bytes | str],
        body: bytes,
    ) -> ReceiverAnswer:
        backend = _FixedAddresses(addresses)
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._tls, max_connections=1, retries=0, network_backend=backend
            ) as pool,
            pool.stream("POST", f"{target.origin}{target.path}", headers=headers, content=body) as answer,
        ):
            with suppress(TimeoutError, httpcore.NetworkError, httpcore.ProtocolError):
                async with asyncio.timeout(_ANSWER_S):
                    await _read_some(answer)
            return ReceiverAnswer(answer.status, _retry_after_s(answer.headers))


async def _read_some(answer: httpcore.Response) -> None:
    read = 0
    async for part in answer.aiter_stream():
        read += len(part)
        if read >= _MAX_ANSWER_BYTES:
            return


class _FixedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were resolved and checked before, whatever the name resolves to now.

    The TLS connection is still verified for the name.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        for address in self._addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(str(address), port, _CONNECT_S)
        return await self._backend.connect_tcp(str(self._addresses[-1]), port, _CONNECT_S)


def _is_of_tls(error: BaseException) -> bool:
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, ssl.SSLError):
            return True
        each = each.__cause__ or each.__context__
    return False


def _retry_after_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Seconds, or the seconds until a date. None: there is no such header, or it is something else."""
    text = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1")
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
