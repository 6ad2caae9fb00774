"""Who is calling: bearer keys of users and admins, credentials of nodes."""

import time
from threading import Lock
from typing import Annotated

from fastapi import Depends, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from mooring.control import api_keys
from mooring.control.api_keys import Caller
from mooring.core import credentials
from mooring.core.errors import Unauthorized
from mooring.db.session import Database

# A revoked key must stop working within a second on every replica; looking it up for each request would
# cost more than most requests do.
REMEMBERED_S = 0.5
NODE_REMEMBERED_S = 60.0
_LIMIT = 20_000

user_scheme = HTTPBearer(
    auto_error=False, scheme_name="ApiKey", description="An API key: `Authorization: Bearer mk_…`"
)
_node_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="NodeCredential",
    description="A node's credential: `Authorization: Bearer mn_…`",
)


class KeyCache:
    """Callers by the hash of their key, for half a second; nodes for a minute; failures not at all."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()
        self._callers: dict[str, tuple[float, Caller]] = {}
        self._nodes: dict[str, tuple[float, str]] = {}

    def remembered(self, secret: str) -> Caller | None:
        found = self._callers.get(credentials.hashed(secret))
        return found[1] if found and time.monotonic() - found[0] < REMEMBERED_S else None

    def node(self, credential: str) -> str | None:
        """The node of a credential seen in the last minute. Whoever acts on it looks at the node itself."""
        found = self._nodes.get(credentials.hashed(credential))
        return found[1] if found and time.monotonic() - found[0] < NODE_REMEMBERED_S else None

    def look_up_node(self, credential: str) -> str:
        """Raises Unauthorized."""
        with self._database.read() as session:
            node_id = api_keys.identify_node(session, credential)
        with self._lock:
            if len(self._nodes) >= _LIMIT:
                self._nodes.clear()
            self._nodes[credentials.hashed(credential)] = (time.monotonic(), node_id)
        return node_id

    def caller(self, secret: str) -> Caller:
        """Whose key this is; may look it up, so not for the event loop.

        Raises:
            Unauthorized: nobody's.
        """
        return self.remembered(secret) or self.look_up(secret)

    def look_up(self, secret: str) -> Caller:
        """Raises Unauthorized."""
        with self._database.read() as session:
            caller = api_keys.identify(session, secret)
            stale = api_keys.use_is_stale(session, caller.key_id)
        if stale:
            with self._database.write() as session:
                api_keys.note_use(session, caller.key_id)
        with self._lock:
            if len(self._callers) >= _LIMIT:
                self._callers.clear()
            self._callers[credentials.hashed(secret)] = (time.monotonic(), caller)
        return caller


def secret_of(given: HTTPAuthorizationCredentials | None) -> str:
    """Raises Unauthorized when the request carries no bearer credentials."""
    if given is None:
        raise Unauthorized("send your API key: -H 'Authorization: Bearer <key>'")
    return given.credentials


async def _caller(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(user_scheme)]
) -> Caller:
    keys: KeyCache = request.app.state.context.keys
    secret = secret_of(given)
    remembered = keys.remembered(secret)
    return remembered if remembered is not None else await run_in_threadpool(keys.look_up, secret)


async def _admin(caller: Annotated[Caller, Depends(_caller)]) -> Caller:
    caller.require(api_keys.ADMIN)
    return caller


async def _node(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(_node_scheme)]
) -> str:
    keys: KeyCache = request.app.state.context.keys
    secret = secret_of(given)
    remembered = keys.node(secret)
    return remembered if remembered is not None else await run_in_threadpool(keys.look_up_node, secret)


CurrentCaller = Annotated[Caller, Depends(_caller)]
Admin = Annotated[Caller, Depends(_admin)]
CurrentNode = Annotated[str, Depends(_node)]
