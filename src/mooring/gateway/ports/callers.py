"""Who calls a port, and whether they may: an API key, a link, the cookie that a link sets, or everybody."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

from cachetools import TTLCache
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from mooring.auth.credentials import Credentials, LiveAccess
from mooring.control.instances import port_links, proxied_ports
from mooring.control.instances.port_tokens import PortToken, TokenKind
from mooring.control.instances.proxied_ports import ProxiedPort
from mooring.core.access import Access, Caller, Permission
from mooring.core.port_urls import PortAddress
from mooring.db import failures
from mooring.db.session import Database
from mooring.gateway.keys import GatewayKeys
from mooring.gateway.ports import cookies
from mooring.gateway.ports.heads import Fields, value_of, values_of
from mooring.gateway.ports.own_credentials import OwnCredentials, bearer
from mooring.gateway.ssh.users import SshAccess, SshUser, SshUsers
from mooring.streams.node_streams import RevocableAccess
from mooring_client.errors import Conflict, Forbidden, NotFound, Unauthorized, Unavailable

_ACTION: Final = "instance.port"
_FOUND_S: Final = 1.0  # how old a looked-up address may be
_COOKIE_S: Final = 86_400
_MAX_CACHED: Final = 10_000
# Streams of a caller to a port in this time are one row of the audit log: browsers open many.
_AUDITED_EVERY_S: Final = 600.0
_SIGN_IN: Final = (
    "this port needs a key or a link: send `Authorization: Bearer <API key>`, or open the link that "
    "POST /v1/instances/<id>/ports/<port>/links of the API returns"
)
_WHICH: Final = (
    "this name may mean several instances; use https://<port>-ins-<the rest of the instance's id>.<domain>/"
)


@dataclass(frozen=True, slots=True)
class PortRequest:
    """What of a request decides who calls.

    Attributes:
        host: as in the request.
        path: for the program, as the client sent it.
        query: null: none.
        client: the address of the client.
        prefix: of the path that the program does not see; empty: none.
        is_secure: the client uses HTTPS.
    """

    address: PortAddress
    method: bytes
    host: bytes
    path: bytes
    query: bytes | None
    fields: Fields
    client: str
    prefix: str
    is_secure: bool


@dataclass(frozen=True, slots=True)
class PortUser:
    """A caller who may use a port.

    Attributes:
        key: of the credential; connections to the program are not shared between different ones.
        cookie: to set in the answer.
        is_redirected: to the same path without the link's token, so that the program does not see it.
        has_our_authorization: the Authorization header is for this proxy.
    """

    port: ProxiedPort
    key: str
    live: RevocableAccess
    cookie: bytes | None = None
    is_redirected: bool = False
    has_our_authorization: bool = False


class PortUsers:
    """Looks addresses and credentials up, with short caches."""

    def __init__(
        self,
        database: Database,
        credentials: Credentials,
        holders: SshUsers,
        keys: GatewayKeys,
        own: OwnCredentials,
    ) -> None:
        self._own = own
        self._database, self._credentials = database, credentials
        self._holders, self._keys = holders, keys
        self._found: TTLCache[PortAddress, Sequence[ProxiedPort]] = TTLCache(_MAX_CACHED, _FOUND_S)
        # For while the database does not answer.
        self._last: TTLCache[PortAddress, Sequence[ProxiedPort]] = TTLCache(_MAX_CACHED, 600.0)
        self._audited: TTLCache[tuple[str, str, int], bool] = TTLCache(_MAX_CACHED, _AUDITED_EVERY_S)

    async def authorized(self, request: PortRequest) -> PortUser:
        """Who calls.

        Raises:
            Unauthorized: nobody who may.
            Forbidden: the key lacks `instances:exec`, or a page of another origin sent the request.
            NotFound: the key sees no such instance.
            Conflict: the name does not say which instance is meant.
            TooManyRequests: too many invalid keys came from the address.
            Unavailable: the database does not answer.
        """
        ports = await self.found(request.address)
        secret = bearer(value_of(request.fields, b"authorization") or b"")
        if secret is not None and await self._own.include(secret):
            return await self._of_key(request, ports, secret)
        link = token_in(request.query)
        if link is not None and (user := await self._of_link(request, ports, link)) is not None:
            return user
        if (user := await self._of_cookie(request, ports)) is not None:
            return user
        # On a shared origin, everybody's page could use the sessions of others.
        if not request.prefix and any(port.auth == "public" for port in ports):
            port = _only(ports)
            return PortUser(port, f"public {request.client}", PublicAccess(self, request, port))
        if link is not None:
            raise Unauthorized("this link was used or has expired; get another one")
        raise Unauthorized(_SIGN_IN)

    def audited(self, user: PortUser) -> RevocableAccess:
        """The access for a new stream. Only the first one in a while is recorded in the audit log."""
        return _Unrecorded(user.live) if _audit_key(user) in self._audited else user.live

    def opened(self, user: PortUser) -> None:
        """A stream was opened with the access that `audited` has returned."""
        self._audited.setdefault(_audit_key(user), True)

    async def found(self, address: PortAddress) -> Sequence[ProxiedPort]:
        """The ports that an address can mean, at most a second old. Raises Unavailable."""
        if (known := self._found.get(address)) is not None:
            return known
        try:
            with failures.as_unavailable():
                ports = await run_in_threadpool(self._find, address)
        except Unavailable:
            if (last := self._last.get(address)) is not None:
                return last
            raise
        self._found[address] = self._last[address] = ports
        return ports

    def _find(self, address: PortAddress) -> Sequence[ProxiedPort]:
        with self._database.read() as session:
            return proxied_ports.matching(session, address)

    async def _of_key(self, request: PortRequest, ports: Sequence[ProxiedPort], secret: str) -> PortUser:
        if self._own.is_sign_on(secret):
            raise Unauthorized("ports accept API keys, not tokens of the sign-on; or open a link")
        with failures.as_unavailable():
            caller = await self._credentials.caller(secret, request.client)
        visible = [port for port in ports if caller.sees(port.project_id)]
        if not visible:
            raise NotFound("your key sees no such instance, or the port is udp")
        port = _only(visible)
        access = Access(caller, Permission.EXEC, _ACTION, request.client)
        access.require(port.project_id, "no such instance")
        live = LiveAccess(access, self._credentials, secret)
        return PortUser(port, caller.id, live, has_our_authorization=True)

    async def _of_link(
        self, request: PortRequest, ports: Sequence[ProxiedPort], text: str
    ) -> PortUser | None:
        """Who made the link; null: it does not work (any more)."""
        found = await self._of_token(
            request, ports, self._keys.tokens.verify(TokenKind.LINK, text, time.time())
        )
        if found is None:
            return None
        token, user = found
        if token.id and not (request.method == b"GET" and await self._used(token.id)):
            return None
        # The cookie of a link that works many times ends with it.
        expires_at = int(time.time()) + _COOKIE_S if token.id else token.expires_at
        value = self._keys.tokens.sign(TokenKind.COOKIE, replace(token, expires_at=expires_at, id=""))
        cookie = cookies.made(
            value,
            secure=request.is_secure,
            path=request.prefix or "/",
            max_age_s=max(1, expires_at - int(time.time())),
        )
        is_navigation = value_of(request.fields, b"sec-fetch-mode") == b"navigate"
        return replace(user, cookie=cookie, is_redirected=bool(token.id) or is_navigation)

    async def _used(self, link_id: str) -> bool:
        def use(session: Session) -> bool:
            return port_links.use(session, link_id)

        with failures.as_unavailable():
            return await run_in_threadpool(self._write, use)

    def _write(self, act: Callable[[Session], bool]) -> bool:
        with self._database.write() as session:
            return act(session)

    async def _of_cookie(self, request: PortRequest, ports: Sequence[ProxiedPort]) -> PortUser | None:
        for text in cookies.ours(values_of(request.fields, b"cookie")):
            token = self._keys.tokens.verify(TokenKind.COOKIE, text, time.time())
            found = await self._of_token(request, ports, token)
            if found is not None:
                require_own_origin(request)
                return found[1]
        return None

    async def _of_token(
        self, request: PortRequest, ports: Sequence[ProxiedPort], token: PortToken | None
    ) -> tuple[PortToken, PortUser] | None:
        """Null: the token is not of this port, or its credential has ended."""
        if token is None or token.port != request.address.port:
            return None
        wanted = token.instance_id, token.auth
        port = next((each for each in ports if (each.instance_id, each.auth) == wanted), None)
        if port is None:
            return None
        try:
            caller = await self._holders.renewed(token.holder)
        except Unauthorized:
            return None
        access = Access(caller, Permission.EXEC, _ACTION, request.client)
        access.require(port.project_id, "no such instance")
        live = SshAccess(self._holders, SshUser(token.holder, caller), access)
        return token, PortUser(port, token.holder, live)


class PublicAccess:
    """The access of everybody to a public port, while it is public."""

    def __init__(self, users: PortUsers, request: PortRequest, port: ProxiedPort) -> None:
        self._users, self._address, self._port = users, request.address, port
        permissions = {port.project_id: frozenset({Permission.EXEC})}
        caller = Caller("public", "system", "everybody", permissions=permissions)
        self.access = Access(caller, Permission.EXEC, _ACTION, request.client)

    async def renewed(self) -> Access:
        """Raises Forbidden: the port is not public any more."""
        try:
            ports = await self._users.found(self._address)
        except Unavailable:
            return self.access
        if self._port not in ports:
            raise Forbidden("the port is not public any more")
        return self.access


class _Unrecorded:
    """An access whose streams are not recorded in the audit log."""

    def __init__(self, live: RevocableAccess) -> None:
        self._live = live

    @property
    def access(self) -> Access:
        return replace(self._live.access, action=None)

    async def renewed(self) -> Access:
        return await self._live.renewed()


def _audit_key(user: PortUser) -> tuple[str, str, int]:
    return user.key, user.port.instance_id, user.port.port


def require_own_origin(request: PortRequest) -> None:
    """Browsers send our cookie also with requests that pages of other instances make.

    Raises:
        Forbidden: a page of another origin makes this request.
    """
    origin = value_of(request.fields, b"origin")
    is_foreign = origin is not None and origin.partition(b"://")[2].lower() != request.host.lower()
    if value_of(request.fields, b"sec-fetch-site") in {b"same-site", b"cross-site"}:
        # Only a link to the page itself.
        is_link = value_of(request.fields, b"sec-fetch-mode") == b"navigate"
        is_link &= value_of(request.fields, b"sec-fetch-dest") == b"document"
        is_foreign |= not (is_link and request.method in {b"GET", b"HEAD"})
    if is_foreign:
        raise Forbidden("a page of another origin may not use your session; open this URL itself")


def token_in(query: bytes | None) -> str | None:
    """The token of a link."""
    for part in (query or b"").split(b"&"):
        name, _, value = part.partition(b"=")
        if name == port_links.PARAMETER.encode():
            return unquote(value.decode("latin-1"))
    return None


def without_token(query: bytes | None) -> bytes | None:
    """The query for the program."""
    if query is None:
        return None
    name = port_links.PARAMETER.encode()
    left = [part for part in query.split(b"&") if part.partition(b"=")[0] != name]
    return b"&".join(left) if left else None


def _only(ports: Sequence[ProxiedPort]) -> ProxiedPort:
    """Raises Conflict: there are several."""
    if len(ports) > 1:
        raise Conflict(_WHICH)
    return ports[0]
