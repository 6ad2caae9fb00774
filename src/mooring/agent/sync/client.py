"""The client for `/agent/v1`. The node opens all connections; nothing connects to it."""

import json
import ssl
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, SecretStr, ValidationError
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from mooring.agent.sync.identity import NodeIdentity
from mooring.core.credentials import hashed
from mooring.schemas.agent import (
    CredentialAnswer,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    SessionAnswer,
    StartSecrets,
    StartSecretsRequest,
    SyncAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamRequests, StreamRequestsQuery
from mooring_client.stream_messages import MAX_MESSAGE_BYTES, SUBPROTOCOL

ANSWER_WITHIN_S: Final = 10.0  # in addition to the requested wait
CLOSED_WITHIN_S: Final = 2.0
_UNREAD_MESSAGES: Final = 4  # of a stream; then its sender waits
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

Answer = TypeVar("Answer", bound=BaseModel)


class ControlPlaneError(Exception):
    """A call failed; the message is for the operator's log."""


class Unreachable(ControlPlaneError):
    """No answer, an invalid one, or any other error. Nothing changes on the node; the call is retried."""


class SessionTaken(ControlPlaneError):
    """A newer agent acts for this node (409 stale_session)."""


class RequestRejected(ControlPlaneError):
    """The control plane rejects the request (403, 404, 409, 410): not allowed, or the object is gone."""


class CredentialRejected(RequestRejected):
    """The token or credential is unknown, expired or replaced (401)."""


class InsecureUrl(ControlPlaneError):
    """The URL would send credentials unencrypted over a network (security rule R22)."""


@dataclass(frozen=True, slots=True)
class AgentCall(Generic[Answer]):
    """A call, the model of its answer, and how long the control plane may wait before it answers."""

    path: str
    request: BaseModel | None
    shape: type[Answer]
    wait_s: float = 0


SESSION_CALL: Final = AgentCall("/agent/v1/session", None, SessionAnswer)


def sync_call(request: SyncRequest) -> AgentCall[SyncAnswer]:
    return AgentCall("/agent/v1/sync", request, SyncAnswer, request.wait_s)


def heartbeat_call(heartbeat: Heartbeat) -> AgentCall[HeartbeatAnswer]:
    return AgentCall("/agent/v1/heartbeat", heartbeat, HeartbeatAnswer, heartbeat.wait_s)


def stream_requests_call(query: StreamRequestsQuery) -> AgentCall[StreamRequests]:
    """The streams that this node should serve. Waits for a stream that is not in `query.known`."""
    return AgentCall("/agent/v1/stream-requests", query, StreamRequests, query.wait_s)


class ControlPlaneClient:
    """One node's connections to one control plane. Any thread may call; each call uses its own connection.

    Args:
        insecure_http: accept plain HTTP to another machine (MOORING_INSECURE_HTTP). An eavesdropper on
            that network can then take over the node. TLS certificates are always verified.
        http: the nodes of a process may share it; by default this node has its own.
    """

    def __init__(self, url: str, *, insecure_http: bool = False, http: httpx.Client | None = None) -> None:
        self._url, self._insecure_http = url.rstrip("/"), insecure_http
        self._require_secure(self._url)
        self._client = http or blocking_client(self._url)
        self._credential: SecretStr | None = None
        self._former: SecretStr | None = None
        self._node_id: str | None = None

    def identify(self, identity: NodeIdentity) -> None:
        """Use this node's credential for all further calls, and accept only answers for this node."""
        self._credential, self._former = identity.credential, identity.former_credential
        self._node_id = identity.node_id

    def join(self, token: str, node_name: str, hostname: str, credential: SecretStr) -> JoinAnswer:
        """Safe to repeat with the same credential. An earlier release returns another one."""
        request = JoinRequest(
            token=token,
            node_name=node_name,
            hostname=hostname,
            credential_hash=hashed(credential.get_secret_value()),
        )
        return self.call(AgentCall("/agent/v1/join", request, JoinAnswer))

    def renewed(self, identity: NodeIdentity) -> NodeIdentity:
        """The same node with a new credential, valid at once. Its first use revokes the present one."""
        present = self._credential
        answer = self.call(AgentCall("/agent/v1/credential", None, CredentialAnswer))
        renewed = {"credential": SecretStr(answer.credential), "former_credential": present}
        return identity.model_copy(update=renewed)

    def start_secrets(self, instance_id: str, attempt: int, *, session: int) -> StartSecrets:
        """The secrets of an attempt, available while this node may start it."""
        request = StartSecretsRequest(session=session, attempt=attempt)
        return self.call(AgentCall(f"/agent/v1/instances/{instance_id}/start-secrets", request, StartSecrets))

    def call(self, call: AgentCall[Answer]) -> Answer:
        credential_used = self._credential
        try:
            response = self._client.post(**self._request(call))
        except httpx.HTTPError as error:
            raise Unreachable(_describe(error)) from error
        return self._answer(call, response, credential_used)

    async def awaited(self, call: AgentCall[Answer]) -> Answer:
        """As `call`, in a task (see tasks.py)."""
        return self.call(call)

    def stream_connection(self, stream_id: str, url: str | None) -> connect:
        """A WebSocket to the process that requested this stream; `url` is None if that is this control plane.

        Raises:
            InsecureUrl: the credential would be sent unencrypted.
        """
        base = self._url if url is None else url.rstrip("/")
        self._require_secure(base)
        parts = urlsplit(base)
        is_secure = parts.scheme == "https"
        return _Connect(
            f"{'wss' if is_secure else 'ws'}://{parts.netloc}{parts.path}/agent/v1/streams/{stream_id}",
            additional_headers=self._headers(),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            ssl=_trusted_cas() if is_secure else None,
            proxy=None if is_loopback(parts.hostname or "") else True,
            open_timeout=ANSWER_WITHIN_S,
            close_timeout=CLOSED_WITHIN_S,
            compression=None,
            # Keepalive messages of both sides take the place of pings, whose answers wait behind unread data.
            ping_interval=None,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=_UNREAD_MESSAGES,
            user_agent_header=None,
        )

    def close(self) -> None:
        self._client.close()

    def _request(self, call: AgentCall[Any]) -> dict[str, Any]:
        return {
            "url": self._url + call.path,
            "content": b"{}" if call.request is None else call.request.model_dump_json().encode(),
            "headers": {**self._headers(), "Content-Type": "application/json"},
            "timeout": httpx.Timeout(ANSWER_WITHIN_S, read=call.wait_s + ANSWER_WITHIN_S),
        }

    def _answer(
        self, call: AgentCall[Answer], response: httpx.Response, credential_used: SecretStr | None
    ) -> Answer:
        try:
            _raise_for(response)
        except CredentialRejected:
            if credential_used is not self._credential:
                raise Unreachable("the credential was renewed during the call") from None
            if self._former is None:
                raise
            self._credential, self._former = self._former, None
            raise Unreachable("the newest credential is not known: the one before it is used again") from None
        try:
            # Unknown fields of a newer release are ignored, also inside a spec.
            answer = call.shape.model_validate_json(response.content, extra="ignore", strict=False)
        except ValidationError as error:
            raise Unreachable(
                f"{call.path}: the answer is not a valid {call.shape.__name__}: {_first_error(error)}"
            ) from error
        self._require_own(call.path, answer)
        return answer

    def _require_own(self, path: str, answer: BaseModel) -> None:
        """Raises Unreachable: a faulty proxy has returned the answer to another node."""
        node_id = getattr(answer, "node_id", None)
        if self._node_id is not None and node_id is not None and node_id != self._node_id:
            raise Unreachable(f"{path}: the answer is for the node {node_id}, and this is {self._node_id}")

    def _headers(self) -> dict[str, str]:
        if self._credential is None:
            return {}
        return {"Authorization": f"Bearer {self._credential.get_secret_value()}"}

    def _require_secure(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InsecureUrl(f"{url!r} is not an http(s) URL")
        if parts.scheme == "http" and not is_loopback(parts.hostname) and not self._insecure_http:
            raise InsecureUrl(
                f"refusing to send this node's credential unencrypted to {url}: use https, or set "
                "MOORING_INSECURE_HTTP=true if nobody can eavesdrop on that network"
            )


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        """Follow no redirect: it would send the node's credential to another place."""
        return exc


class LoopClient(ControlPlaneClient):
    """A client whose calls with `awaited` wait in an event loop, without a thread."""

    def __init__(self, url: str, *, insecure_http: bool, http: httpx.Client) -> None:
        super().__init__(url, insecure_http=insecure_http, http=http)
        # One for each node: the time to find a connection grows with the connections of a client.
        self._loop_client = httpx.AsyncClient(**_options(self._url, keepalive_connections=1))

    async def awaited(self, call: AgentCall[Answer]) -> Answer:
        credential_used = self._credential
        try:
            response = await self._loop_client.post(**self._request(call))
        except httpx.HTTPError as error:
            raise Unreachable(_describe(error)) from error
        return self._answer(call, response, credential_used)


def blocking_client(url: str) -> httpx.Client:
    return httpx.Client(**_options(url, keepalive_connections=4))


def _options(url: str, keepalive_connections: int) -> dict[str, Any]:
    """Verify TLS, and use the environment's proxies, but not for loopback."""
    return {
        "verify": _trusted_cas(),
        "trust_env": not is_loopback(urlsplit(url).hostname or ""),
        "timeout": httpx.Timeout(ANSWER_WITHIN_S, read=3 * ANSWER_WITHIN_S),
        "limits": httpx.Limits(
            max_connections=None, max_keepalive_connections=keepalive_connections, keepalive_expiry=60
        ),
    }


@cache
def _trusted_cas() -> ssl.SSLContext:
    """Loading the CA certificates costs 20 ms and 1 MB, so all nodes of a process share them."""
    return httpx.create_ssl_context()


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    code = _problem_code(response)
    message = f"{response.status_code} {code or response.reason_phrase}"
    if response.status_code == HTTPStatus.CONFLICT and code == "stale_session":
        raise SessionTaken(message)
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        raise CredentialRejected(message)
    if response.status_code in {403, 404, 409, 410}:
        raise RequestRejected(message)
    raise Unreachable(message)


def _problem_code(response: httpx.Response) -> str | None:
    try:
        code = json.loads(response.content)["code"]
    except (ValueError, TypeError, KeyError):
        return None
    return code if isinstance(code, str) else None


def _describe(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_error(error: ValidationError) -> str:
    """The place and the message, without the input: answers contain users' environment variables."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
