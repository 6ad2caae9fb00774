# Generated from aio/transport.py: change that file, and run `make client`.
"""Sending requests: retries, deadlines, and streams of server-sent events."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

import httpx

import mooring_client
from mooring_client import answers
from mooring_client.calls import AppliedResource, Call, T
from mooring_client.endpoint import Endpoint
from mooring_client.errors import MooringError, NotFound
from mooring_client.failures import BadAnswer, ConnectionFailed
from mooring_client.retries import Attempts
from mooring_client.sync.sleeping import sleep

CONNECT_TIMEOUT_S: Final = 5.0
# A redirect could send the key to another server.
_FOLLOWS: Final = False


class Transport:
    """An HTTP connection pool to one server, with its credentials.

    Args:
        timeout_s: how long the server may be silent during a request.
        max_retries: how often a failed request is repeated.
        reconnect_s: how long to try to reach the server again while a stream is followed.
        http: an HTTP client with settings of its own, such as a proxy; it is closed with this object.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        max_retries: int,
        reconnect_s: float,
        http: httpx.Client | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.reconnect_s = reconnect_s
        # Without TLS, the certificates of the CAs are not needed; reading them takes 20 ms.
        self._http = http or httpx.Client(
            verify=endpoint.url.startswith("https:"),
            mounts={f"all://{urlsplit(endpoint.url).netloc}": None} if endpoint.is_loopback else None,
        )
        self._headers = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "User-Agent": f"mooring-client/{mooring_client.__version__}",
        }

    def close(self) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Send a request, again if it failed for a reason that may pass, and read the answer.

        Raises:
            MooringError: what the server answered.
            ConnectionFailed: the server could not be reached, or did not answer in time.
            BadAnswer: the answer is not one of Mooring.
        """
        try:
            return call.read((self._answer(call)).content)
        except NotFound as failure:
            if call.method == "DELETE" and call.read is answers.nothing and failure.repeated:
                return call.read(b"")  # an attempt whose answer was lost has deleted it
            raise

    def apply(self, call: Call[T]) -> AppliedResource[T]:
        """As `send`, for a request with all fields of a resource."""
        response = self._answer(call)
        return AppliedResource(call.read(response.content), response.headers.get("Mooring-Applied", ""))

    def _answer(self, call: Call[T]) -> httpx.Response:
        request, attempts = self._request(call), Attempts(self.max_retries)
        while True:
            failure: MooringError | ConnectionFailed
            try:
                response = self._http.send(request, follow_redirects=_FOLLOWS)
            except httpx.RequestError as error:
                failure = self._lost(error)
            else:
                if response.is_success:
                    return response
                failure = _failure(response)
            sleep(attempts.pause_after(failure))

    @contextmanager
    def stream(self, call: Call[T], headers: Mapping[str, str], silent_s: float) -> Iterator[httpx.Response]:
        """Send a request once; yield its successful answer, whose body has not been read.

        Args:
            silent_s: how long the server may be silent before the connection counts as lost.

        Raises:
            MooringError: what the server answered.
            ConnectionFailed: the server could not be reached, or the connection was lost meanwhile.
        """
        try:
            request = self._request(replace(call, headers={**call.headers, **headers}))
            request.extensions["timeout"]["read"] = silent_s
            response = self._http.send(request, stream=True, follow_redirects=_FOLLOWS)
            try:
                if not response.is_success:
                    response.read()
                    raise _failure(response)
                yield response
            finally:
                response.close()
        except httpx.RequestError as error:
            raise self._lost(error) from None

    def headers(self) -> dict[str, str]:
        """The headers of every request, also of those that open a WebSocket."""
        return dict(self._headers)

    def _request(self, call: Call[T]) -> httpx.Request:
        headers = httpx.Headers({**self._headers, **call.headers})
        if call.method == "POST":
            headers.setdefault("Idempotency-Key", uuid4().hex)
        return self._http.build_request(
            call.method,
            f"{self.endpoint.url}{call.path}",
            params=call.query or None,
            json=call.body,
            headers=headers,
            timeout=httpx.Timeout(
                self.timeout_s + call.extra_s, connect=min(self.timeout_s, CONNECT_TIMEOUT_S)
            ),
        )

    def _lost(self, error: httpx.RequestError) -> ConnectionFailed:
        """Raises BadAnswer: the body is not what its headers say."""
        if isinstance(error, httpx.DecodingError):
            raise BadAnswer(f"the answer of {self.endpoint.url} is damaged: {error}")
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        if isinstance(error, httpx.TimeoutException):
            problem = "does not accept connections" if unsent else "did not answer in time"
        else:
            problem = f"cannot be reached: {error}" if unsent else f"closed the connection: {error}"
        return ConnectionFailed(f"{self.endpoint.url} {problem}", may_have_taken_effect=not unsent)


def _failure(response: httpx.Response) -> MooringError | ConnectionFailed:
    if response.is_redirect:
        raise answers.redirect(response.headers.get("Location"))
    return answers.error(response.status_code, response.content, response.headers.get("Retry-After"))
