"""SSH connections: who may open one, what it may do, and when it ends."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import asyncssh

from mooring.auth.rate_limits import ActionClass, network_of
from mooring.core import ssh_public_keys
from mooring.core.access import Caller
from mooring.db import failures
from mooring.gateway.ssh.certificates import CertificateAuthority
from mooring.gateway.ssh.commands import CommandSession
from mooring.gateway.ssh.forwards import Forward, is_in_instance
from mooring.gateway.ssh.pacing import pace_of
from mooring.gateway.ssh.quick_acks import acknowledge_quickly
from mooring.gateway.ssh.shared import SshShared
from mooring.gateway.ssh.users import SshTarget, SshUser
from mooring.gateway.ssh.windows import SMALL_WINDOW, Windows
from mooring.schemas.agent_streams import DialRequest, ExecRequest
from mooring.streams.node_streams import NodeStream
from mooring_client.errors import MooringError, TooManyRequests, Unauthorized, Unavailable

CHANNELS_PER_CONNECTION: Final = 64
# The name of the address of a client that does not connect to the SSH port itself, for `get_extra_info`.
CLIENT_ADDRESS: Final = "mooring_client_address"
KEYS_OFFERED: Final = 20
_LONGEST_HOST: Final = 255
_ENDED: Final = "your SSH key or certificate, or what it acts as, was revoked or has expired"


class ProvenOnce(OrderedDict[bytes, Any]):
    """Host keys. Each is proven once for a client, because a request may name one thousands of times."""

    def __getitem__(self, public_key: bytes) -> Any:
        found = super().__getitem__(public_key)
        del self[public_key]
        return found


class SshConnection(asyncssh.SSHServer):
    """One connection: the callbacks of asyncssh."""

    def __init__(self, shared: SshShared) -> None:
        self._shared = shared
        self._conn: asyncssh.SSHServerConnection | None = None
        self._address: str | None = None
        self._network = ""
        self._was_rejected = False  # a key of the client is unknown
        self._offered = 0  # public keys, which are looked up in the database
        # Of the key or certificate that asyncssh validated last, which is that of the login.
        self._credentials: Sequence[str] = ()
        self._quick_acks: asyncio.Task[None] | None = None
        self._opened_at = self._used_at = time.monotonic()
        self._channels = 0
        self._sessions: WeakSet[CommandSession] = WeakSet()
        self.is_ending = False

    # Authentication.

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._conn = conn
        conn._all_server_host_keys = ProvenOnce(conn._all_server_host_keys.items())
        self._pace = pace_of(conn)
        peer = conn.get_extra_info("peername")
        self._address = conn.get_extra_info(CLIENT_ADDRESS) or (peer[0] if peer else None)
        self._network = network_of(self._address)
        if not self._shared.open.connected(self, self._network):
            conn.abort()
            return
        self._quick_acks = asyncio.create_task(acknowledge_quickly(conn.get_extra_info("socket")))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._quick_acks is not None:
            self._quick_acks.cancel()
        was_authenticated = self in self._shared.open.authenticated
        self._shared.open.lost(self)
        if self._was_rejected and not was_authenticated:
            self._count_failure()
        self._conn = None

    def _count_failure(self) -> None:
        """Count once per connection: a client offers all keys of its user."""
        with suppress(Unauthorized, TooManyRequests), self._shared.failures.watched(self._address):
            raise Unauthorized("the client has no registered key")

    def begin_auth(self, username: str) -> bool:
        """Returns True: the client must authenticate. asyncssh forgets earlier authorized keys before it."""
        assert self._conn is not None
        self._conn.set_authorized_keys(CertificateAuthority(self._shared.keys.authorities, self._certified))
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        """Any registered key is accepted: a key for the wrong instance gets a reason later, not a refusal."""
        self._credentials = ()
        self._offered += 1
        if self._offered > KEYS_OFFERED:
            self.disconnect(f"{KEYS_OFFERED} keys are enough: choose one with -i KEY -o IdentitiesOnly=yes")
            return False
        try:
            with self._shared.failures.watched(self._address):
                pass
            fingerprint = ssh_public_keys.fingerprint(key.public_data)
            self._credentials = await self._shared.users.credentials_of(fingerprint)
        except MooringError as error:
            self.disconnect(error.message)
            return False
        self._was_rejected |= not self._credentials
        return bool(self._credentials)

    def _certified(self, holder: str) -> None:
        self._credentials = [holder]

    async def auth_completed(self) -> None:
        """Refuse a client whose certificate has outlived its holder, or that has too many connections."""
        if self._quick_acks is not None:
            self._quick_acks.cancel()
        credentials = self._credentials
        try:
            users = await self._users()
            if self._conn is None:
                return  # lost meanwhile
            self._shared.open.authenticate(self, [user.caller.limited_as for user in users])
        except MooringError as error:
            self.disconnect(error.message)
            return
        for credential in credentials:
            await self._shared.users.record_use(credential)

    async def _users(self) -> Sequence[SshUser]:
        """Raises Unauthorized: all of its credentials have ended."""
        users = await self._shared.users.valid(self._credentials)
        if not users:
            raise Unauthorized(_ENDED)
        return users

    # Its end.

    @property
    def credentials(self) -> Sequence[str]:
        return self._credentials

    def require_allowed(self, callers: dict[str, Caller]) -> None:
        """Disconnect if it is idle or open for too long, or none of its credentials is among these."""
        now, shared = time.monotonic(), self._shared
        if shared.idle_s and now - self._used_at > shared.idle_s:
            self.disconnect(f"no data for {shared.idle_s:.0f} s")
        elif shared.longest_s and now - self._opened_at > shared.longest_s:
            self.disconnect(f"a connection may last {shared.longest_s:.0f} s")
        elif not any(each in callers for each in self._credentials):
            self.disconnect(_ENDED)

    def disconnect(self, reason: str) -> None:
        self.is_ending = True
        # OpenSSH ends with its last session, before it reads the reason of the disconnection.
        for session in list(self._sessions):
            session.end_because(reason)
        if self._conn is not None:
            self._conn.disconnect(asyncssh.DISC_BY_APPLICATION, reason)

    # Channels.

    def session_requested(self) -> tuple[asyncssh.SSHServerChannel[bytes], CommandSession]:
        conn = self._take_room()
        session = CommandSession(self, self._open_command, self._banner)
        self._sessions.add(session)
        return conn.create_server_channel(window=SMALL_WINDOW), session

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> tuple[asyncssh.SSHTCPChannel[bytes], Awaitable[Forward]]:
        if max(len(dest_host), len(orig_host)) > _LONGEST_HOST:  # asyncssh stores them
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "a host name is too long")
        conn = self._take_room()
        return conn.create_tcp_channel(window=SMALL_WINDOW), self._forward(dest_host, dest_port)

    async def _forward(self, host: str, port: int) -> Forward:
        try:
            stream = await self._dial(host, port)
        except BaseException:
            self.closed()
            raise
        if self._conn is None:  # asyncssh starts no session, which would close the stream
            self.closed()
            await stream.close()
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "the client is gone")
        return Forward(self, stream)

    @property
    def windows(self) -> Windows:
        return self._shared.windows

    async def drained(self) -> None:
        await self._pace.drained()

    def used(self) -> None:
        self._used_at = time.monotonic()

    def closed(self) -> None:
        self._channels -= 1

    def _take_room(self) -> asyncssh.SSHServerConnection:
        """Count a channel. Raises ChannelOpenError."""
        conn = self._conn
        assert conn is not None  # it asks for the channel
        if self._channels >= CHANNELS_PER_CONNECTION:
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_RESOURCE_SHORTAGE,
                f"a connection can have {CHANNELS_PER_CONNECTION} sessions and forwarded connections",
            )
        self._channels += 1
        return conn

    async def _target(self) -> SshTarget:
        if self._conn is None:  # lost since the channel was requested
            raise Unavailable("the client is gone")
        name: str = self._conn.get_extra_info("username")
        return await self._shared.users.target(await self._users(), name, self._address)

    async def _open_command(self, requested: ExecRequest) -> NodeStream:
        return await self._open(await self._target(), requested)

    async def _dial(self, host: str, port: int) -> NodeStream:
        """Raises ChannelOpenError: the destination is another host, or nothing accepts the connection."""
        try:
            target = await self._target()
            if not is_in_instance(host, target.name):
                raise asyncssh.ChannelOpenError(
                    asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED,
                    f"{host} is not in the instance: use localhost",
                )
            if not 1 <= port <= 65_535:
                raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, f"no port {port}")
            return await self._open(target, DialRequest(port=port))
        except MooringError as error:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, error.message) from None

    async def _open(self, target: SshTarget, requested: ExecRequest | DialRequest) -> NodeStream:
        opener, access = self._shared.opener, target.live.access
        _headers, too_many = self._shared.rates.take(access.caller, ActionClass.STREAM)
        if too_many is not None:
            raise too_many
        limit = partial(self._shared.node_streams.opened, is_admin=access.caller.is_admin)
        with failures.as_unavailable():
            found = await opener.find(access, target.instance_id, requested)
            return await opener.open(target.live, found, requested, limit)

    async def _banner(self) -> str:
        return await self._shared.users.banner((await self._target()).instance_id)
