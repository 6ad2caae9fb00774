"""Who an SSH client is, and which instance it means.

A credential is the id of a registered key (`ssh_…`), or the holder that a certificate names (`key_…/prj_…`).
"""

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cachetools import LRUCache, TTLCache
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from mooring.control.instances import ssh_banner, ssh_names
from mooring.control.tenants import ssh_holders, ssh_keys
from mooring.control.tenants.ssh_holders import Holder
from mooring.core import ids
from mooring.core.access import RENEWED_S, Access, Caller, Permission
from mooring.db import failures
from mooring.db.session import Database
from mooring_client.errors import Conflict, MooringError, NotFound, Unauthorized, Unavailable

_MAX_CACHED: Final = 20_000
_USE_RECORDED_EVERY_S: Final = 60.0
_NO_ANSWER: Final = (*failures.DATABASE_ERRORS, Unavailable)  # of the database


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SshUser:
    """A valid credential, and what it may do."""

    credential: str
    caller: Caller

    @property
    def principal(self) -> str:
        """The person, or the API key that belongs to no person."""
        return self.caller.user_id or self.caller.id


@dataclass(frozen=True, slots=True)
class SshTarget:
    """The instance that a client means.

    Attributes:
        live: the access to it of the client's credential.
    """

    instance_id: str
    name: str
    live: "SshAccess"


class SshUsers:
    """Looks credentials and instances up. Callers are cached as long as open streams may use them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Credential -> when it was read (`time.monotonic`), and its caller.
        self._callers: LRUCache[str, tuple[float, Caller]] = LRUCache(_MAX_CACHED)
        self._used: TTLCache[str, bool] = TTLCache(_MAX_CACHED, _USE_RECORDED_EVERY_S)

    async def credentials_of(self, fingerprint: str) -> Sequence[str]:
        """The valid registrations of a public key; empty: it is unknown.

        Raises:
            Unavailable: the database does not answer.
        """
        with failures.as_unavailable():
            return await run_in_threadpool(self._credentials_of, fingerprint)

    def _credentials_of(self, fingerprint: str) -> Sequence[str]:
        with self._database.read() as session:
            return ssh_keys.matching(session, fingerprint)

    async def valid(self, credentials: Sequence[str]) -> Sequence[SshUser]:
        """The users of those credentials that have not ended.

        Raises:
            Unavailable: the database does not answer, and a credential is not known.
        """
        users = []
        for credential in credentials:
            try:
                users.append(SshUser(credential, await self.renewed(credential)))
            except Unauthorized:
                continue
        return users

    async def renewed(self, credential: str) -> Caller:
        """The caller now; while the database does not answer, the last known one.

        Raises:
            Unauthorized: the credential has ended.
            Unavailable: the database does not answer, and the credential is not known.
        """
        known = self._callers.get(credential)
        if known is not None and time.monotonic() - known[0] < RENEWED_S:
            return known[1]
        caller = (await self.refreshed([credential])).get(credential) or (known and known[1])
        if caller is None:
            raise Unauthorized("your SSH key or certificate, or what it acts as, has ended")
        return caller

    async def refreshed(self, credentials: Collection[str]) -> dict[str, Caller]:
        """Read the callers of those credentials that have not ended. Without an answer, none has ended.

        Raises:
            Unavailable: the database does not answer, and a credential is not known.
        """
        since = time.monotonic()
        try:
            with failures.as_unavailable():
                found = await run_in_threadpool(self._read, credentials)
        except Unavailable:
            known = {each: self._callers.get(each) for each in credentials}
            if None in known.values():
                raise
            return {each: caller[1] for each, caller in known.items() if caller is not None}
        for credential in credentials:
            if credential in found:
                self._callers[credential] = since, found[credential]
            else:
                self._callers.pop(credential, None)
        return found

    def _read(self, credentials: Iterable[str]) -> dict[str, Caller]:
        found = {}
        with self._database.read() as session:
            for credential in credentials:
                try:
                    found[credential] = _caller_of(session, credential)
                except Unauthorized:
                    continue
        return found

    async def record_use(self, credential: str) -> None:
        """Record that a registered key was used, if possible and not just recorded."""
        if not _is_key(credential) or credential in self._used:
            return
        self._used[credential] = True
        try:
            await run_in_threadpool(self._record_use, credential)
        except _NO_ANSWER as error:
            log.warning("cannot record the use of the SSH key %s: %s", credential, error)

    def _record_use(self, credential: str) -> None:
        with self._database.write() as session:
            ssh_keys.record_use(session, credential)

    async def banner(self, instance_id: str) -> str:
        """What the client sees when its shell starts. Raises Unavailable: the database does not answer."""
        with failures.as_unavailable():
            return await run_in_threadpool(self._banner, instance_id)

    def _banner(self, instance_id: str) -> str:
        with self._database.read() as session:
            return ssh_banner.banner(session, instance_id)

    async def target(self, users: Sequence[SshUser], name: str, address: str | None) -> SshTarget:
        """The instance with this name.

        Raises:
            NotFound: none of the users sees such an instance.
            Forbidden: a user sees it, but lacks `instances:exec`.
            Conflict: the name does not say which instance is meant.
            Unavailable: the database does not answer.
        """
        with failures.as_unavailable():
            return await run_in_threadpool(self._target, users, name, address)

    def _target(self, users: Sequence[SshUser], name: str, address: str | None) -> SshTarget:
        found: dict[str, tuple[str, SshTarget]] = {}
        denied: MooringError | None = None
        with self._database.read() as session:
            for user in users:
                live = SshAccess(self, user, Access(user.caller, Permission.EXEC, "ssh", address))
                readable = replace(live.access, permission=Permission.READ)
                for row, project in ssh_names.matching(session, readable, name):
                    try:
                        live.access.require(row.project_id, f"no instance {name}")
                    except MooringError as error:
                        denied = error
                    else:
                        found[row.id] = (f"{row.name}.{project}", SshTarget(row.id, row.name, live))
        if len(found) > 1 or (found and _needs_project(users, name)):
            names = ", ".join(sorted(full for full, _target in found.values()))
            raise Conflict(f"name the project too, because {name} may mean several instances: {names}")
        for _full, target in found.values():
            return target
        raise denied or NotFound(f"your key sees no instance {name}")


def _needs_project(users: Sequence[SshUser], name: str) -> bool:
    """Whether a name is not enough.

    Anyone can register any public key, also that of another person, whose names would then mean instances of
    the other project.
    """
    return len({user.principal for user in users}) > 1 and not ssh_names.is_unique(name)


def _caller_of(session: Session, credential: str) -> Caller:
    if _is_key(credential):
        return ssh_keys.caller_of(session, credential)
    return ssh_holders.caller_of(session, Holder.from_text(credential))


def _is_key(credential: str) -> bool:
    return credential.startswith(f"{ids.SSH_KEY}_")


class SshAccess:
    """The access of a client, renewed while its streams are open (R29)."""

    def __init__(self, users: SshUsers, user: SshUser, access: Access) -> None:
        self._users, self._user, self.access = users, user, access

    async def renewed(self) -> Access:
        """Raises Unauthorized: the credential has ended."""
        self.access = replace(self.access, caller=await self._users.renewed(self._user.credential))
        return self.access
