"""Resolves credentials to callers and nodes, with a short cache."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Generic, TypeVar

from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from mooring.auth.oidc import SignOn, looks_like_token
from mooring.auth.rate_limits import FailedAttempts
from mooring.control.tenants import api_keys, sso
from mooring.core import credentials
from mooring.core.access import RENEWED_S, Access, Caller, lacking
from mooring.core.sign_on import Person
from mooring.db import failures
from mooring.db.session import Database
from mooring.db.types import now
from mooring_client.errors import Unauthorized, Unavailable

log = logging.getLogger(__name__)

# A revoked key must stop working within a second on every replica. A lookup for each request would cost more
# than most requests do.
CACHED_S = 0.5
NODE_CACHED_S = 60.0
_MAX_ENTRIES = 20_000

Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class NodeCaller:
    """The node of a credential. It may come from a cache: operations compare the hash with the node's row."""

    id: str
    credential_hash: str


class _Cache(Generic[Known]):
    """Values by the hash of a secret. Failures are not cached.

    An expired entry still shows that its secret was valid once.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._lock = Lock()
        self._known: LRUCache[str, tuple[float, float, Known]] = LRUCache(_MAX_ENTRIES)

    def get(self, hashed: str, max_age_s: float | None = None) -> Known | None:
        with self._lock:
            found = self._known.get(hashed)
        if found is None:
            return None
        since, until, known = found
        now = time.monotonic()
        is_fresh = now - since < (self._ttl_s if max_age_s is None else max_age_s)
        return known if is_fresh and now < until else None

    def was_valid(self, hashed: str) -> bool:
        return hashed in self._known

    def forget(self, hashed: str) -> None:
        with self._lock:
            self._known.pop(hashed, None)

    def put(self, hashed: str, known: Known, since: float, until: float = float("inf")) -> None:
        with self._lock:
            self._known[hashed] = (since, until, known)


class Credentials:
    """Resolves keys and tokens (cached for half a second), and node credentials (for a minute)."""

    def __init__(self, database: Database, failures: FailedAttempts, sign_on: SignOn | None = None) -> None:
        self._database = database
        self.failures = failures
        self._sign_on = sign_on
        self._callers: _Cache[Caller] = _Cache(CACHED_S)
        self._nodes: _Cache[NodeCaller] = _Cache(NODE_CACHED_S)

    async def caller(self, secret: str, address: str | None = None) -> Caller:
        """The caller of an API key or a single sign-on token.

        Raises:
            Unauthorized: the credential is not valid.
            TooManyRequests: too many invalid credentials came from this address.
            SsoUnavailable: cannot reach the token's issuer, whose keys are needed.
        """
        hashed = credentials.hashed(secret)
        known = self._callers.get(hashed)
        if known is not None:
            return known
        look_up = partial(self._caller_of, secret, hashed, address)
        return await self._looked_up(self._callers, look_up, hashed, address)

    async def recheck(self, secret: str, address: str | None) -> Caller:
        """The current caller of a credential that was valid at the start of its request. Counts no failure.

        Raises:
            Unauthorized, SsoUnavailable: as `caller`.
        """
        hashed = credentials.hashed(secret)
        known = self._callers.get(hashed, RENEWED_S)
        return known if known is not None else await self._caller_of(secret, hashed, address)

    async def node(self, secret: str, address: str | None = None) -> NodeCaller:
        """The node of a credential.

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
        cache: _Cache[Known],
        look_up: Callable[[], Awaitable[Known]],
        hashed: str,
        address: str | None,
    ) -> Known:
        with self.failures.watched(address, trusted=cache.was_valid(hashed)):
            try:
                return await look_up()
            except Unauthorized:
                cache.forget(hashed)
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
        # Read the clock before the lookup, so that a revocation during it takes effect in time.
        since = time.monotonic()
        with self._database.read() as session:
            caller, stale = api_keys.identify(session, secret)
        if stale:
            self._record_use(caller)
        self._callers.put(hashed, caller, since)
        return caller

    def _record_use(self, caller: Caller) -> None:
        """Record it if possible: a database that rejects writes still answers reads."""
        try:
            with self._database.write() as session:
                api_keys.record_use(session, caller.id)
        except failures.DATABASE_ERRORS as error:
            if not failures.is_unavailable(error):
                raise
            log.warning("cannot record the use of the key %s: %s", caller.id, error)

    def _signed_on(self, person: Person, hashed: str, address: str | None) -> Caller:
        since = time.monotonic()
        until = since + person.expires_at - now().timestamp()
        with self._database.read() as session:
            caller = sso.identify(session, person)
        if caller is None:
            with self._database.write() as session:
                caller = sso.provision(session, person, address)
        self._callers.put(hashed, caller, since, until)
        return caller

    def _look_up_node(self, secret: str, hashed: str) -> NodeCaller:
        since = time.monotonic()
        with self._database.read() as session:
            node = NodeCaller(api_keys.identify_node(session, secret), hashed)
        self._nodes.put(hashed, node, since)
        return node


@dataclass(frozen=True, slots=True)
class LiveAccess:
    """The access of a long-running request, which may be revoked meanwhile (R29)."""

    access: Access
    _credentials: Credentials
    _secret: str

    async def renewed(self) -> Access:
        """The current access.

        Raises:
            Unauthorized: the credential was revoked or has expired.
            Forbidden: the caller may no longer do this in any project.
        """
        try:
            caller = await self._credentials.recheck(self._secret, self.access.address)
        except (SQLAlchemyError, Unavailable):
            return self.access  # without an answer, nothing is known to be revoked
        if not caller.may_somewhere(self.access.permission):
            raise lacking(self.access.permission)
        return replace(self.access, caller=caller)
