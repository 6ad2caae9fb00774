"""Credentials and whom they stand for, remembered for a moment."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from mooring.api.auth.oidc import SignOn, looks_like_token
from mooring.api.auth.rate_limits import FailedAttempts
from mooring.control.tenants import api_keys, sso
from mooring.core import credentials
from mooring.core.access import Access, Caller, lacking
from mooring.core.errors import Unauthorized, Unavailable
from mooring.core.sign_on import Person
from mooring.db.session import Database

# A revoked key must stop working within a second on every replica; looking it up for each request would
# cost more than most requests do.
REMEMBERED_S = 0.5
NODE_REMEMBERED_S = 60.0
# What stays open must end within five seconds of a revocation: it asks again this often, and is content with
# what another stream of the same key heard this long ago.
RENEWED_S = 2.0
_LIMIT = 20_000

Known = TypeVar("Known")


class _Memory(Generic[Known]):
    """Values by the hash of a secret, for a time. Failures are not remembered.

    An entry that is too old to be believed still says that its secret was good once.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._lock = Lock()
        self._known: dict[str, tuple[float, float, Known]] = {}

    def get(self, hashed: str, within_s: float | None = None) -> Known | None:
        found = self._known.get(hashed)
        if found is None:
            return None
        age_s, now = self._kept_s if within_s is None else within_s, time.monotonic()
        since, until, known = found
        return known if now - since < age_s and now < until else None

    def was_good(self, hashed: str) -> bool:
        return hashed in self._known

    def forget(self, hashed: str) -> None:
        with self._lock:
            self._known.pop(hashed, None)

    def put(self, hashed: str, known: Known, since: float, until: float = float("inf")) -> None:
        with self._lock:
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known[hashed] = (since, until, known)


class Credentials:
    """Callers by their key or token, for half a second; nodes by their credential, for a minute."""

    def __init__(self, database: Database, failures: FailedAttempts, sign_on: SignOn | None = None) -> None:
        self._database = database
        self.failures = failures
        self._sign_on = sign_on
        self._callers: _Memory[Caller] = _Memory(REMEMBERED_S)
        self._nodes: _Memory[str] = _Memory(NODE_REMEMBERED_S)

    async def caller(self, secret: str, address: str | None = None) -> Caller:
        """Whom the key, or the token of the organisation's sign-on, stands for.

        Raises:
            Unauthorized: nobody.
            TooManyRequests: nor did what came from this address before.
            Unavailable: code `sso_unavailable`: only the sign-on's issuer could tell, and is away.
        """
        hashed = credentials.hashed(secret)
        known = self._callers.get(hashed)
        if known is not None:
            return known
        look_up = partial(self._caller_of, secret, hashed, address)
        return await self._looked_up(self._callers, look_up, hashed, address)

    async def still(self, secret: str, address: str | None) -> Caller:
        """Whom a credential stands for now that was good when its request began, and so is no guess.

        Raises:
            Unauthorized, Unavailable: as `caller`.
        """
        hashed = credentials.hashed(secret)
        known = self._callers.get(hashed, RENEWED_S)
        return known if known is not None else await self._caller_of(secret, hashed, address)

    async def node(self, secret: str, address: str | None = None) -> str:
        """The node of a credential seen in the last minute. Whoever acts on it looks at the node itself.

        Raises:
            Unauthorized, TooManyRequests: as `caller`.
        """
        hashed = credentials.hashed(secret)
        known = self._nodes.get(hashed)
        if known is not None:
            return known
        look_up = partial(run_in_threadpool, self._look_up_node, secret, hashed)
        return await self._looked_up(self._nodes, look_up, hashed, address)

    async def _looked_up(
        self,
        memory: _Memory[Known],
        look_up: Callable[[], Awaitable[Known]],
        hashed: str,
        address: str | None,
    ) -> Known:
        with self.failures.watched(address, trusted=memory.was_good(hashed)):
            try:
                return await look_up()
            except Unauthorized:
                memory.forget(hashed)
                raise

    async def _caller_of(self, secret: str, hashed: str, address: str | None) -> Caller:
        try:
            return await run_in_threadpool(self._look_up, secret, hashed)
        except Unauthorized:
            if self._sign_on is None or not looks_like_token(secret):
                raise
        person = await self._sign_on.person(secret)
        return await run_in_threadpool(self._signed_on, person, hashed, address)

    def _look_up(self, secret: str, hashed: str) -> Caller:
        # The clock is read before the look: what is revoked during it is not remembered for longer.
        since = time.monotonic()
        with self._database.read() as session:
            caller, stale = api_keys.identify(session, secret)
        if stale:
            with self._database.write() as session:
                api_keys.record_use(session, caller.id)
        self._callers.put(hashed, caller, since)
        return caller

    def _signed_on(self, person: Person, hashed: str, address: str | None) -> Caller:
        since = time.monotonic()
        until = since + person.expires_at - time.time()
        with self._database.read() as session:
            caller = sso.identify(session, person)
        if caller is None:
            with self._database.write() as session:
                caller = sso.provision(session, person, address)
        self._callers.put(hashed, caller, since, until)
        return caller

    def _look_up_node(self, secret: str, hashed: str) -> str:
        since = time.monotonic()
        with self._database.read() as session:
            node_id = api_keys.identify_node(session, secret)
        self._nodes.put(hashed, node_id, since)
        return node_id


@dataclass(frozen=True, slots=True)
class LiveAccess:
    """The access of a request that goes on for long, and may lose it meanwhile (R29)."""

    access: Access
    _credentials: Credentials
    _secret: str

    async def renewed(self) -> Access:
        """The access as it is now.

        Raises:
            Unauthorized: the credentials were taken back, or have expired.
            Forbidden: what they stand for may no longer do this anywhere.
        """
        try:
            caller = await self._credentials.still(self._secret, self.access.address)
        except (SQLAlchemyError, Unavailable):
            return self.access  # while nobody can be asked, nothing is known to have been taken back
        if not caller.may_somewhere(self.access.permission):
            raise lacking(self.access.permission)
        return replace(self.access, caller=caller)
