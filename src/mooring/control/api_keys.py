"""API keys: who a caller is. Kept as hashes, looked up by index, compared in constant time (R19)."""

from dataclasses import dataclass
from datetime import timedelta
from secrets import token_urlsafe

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from mooring.core import credentials, ids
from mooring.core.errors import Forbidden, Unauthorized
from mooring.db.tables import ApiKey, Node
from mooring.db.types import new_id, now

ADMIN = "admin"
METRICS = "metrics:read"
_LAST_USED_STEP = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key stands for. Admin keys belong to no project and may act in all."""

    key_id: str
    project_id: str | None
    scopes: frozenset[str]

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def require(self, *scopes: str) -> None:
        """Raises Forbidden when the key has none of the scopes and is no admin key."""
        if not self.is_admin and self.scopes.isdisjoint(scopes):
            raise Forbidden(f"this key lacks the scope {' or '.join(scopes)}; use another key")


def identify(session: Session, secret: str) -> Caller:
    """Raises Unauthorized for a key that is unknown, revoked or expired; which of them is not told."""
    row = session.scalar(select(ApiKey).where(ApiKey.secret_hash == credentials.hashed(secret)))
    usable = row is not None and row.revoked_at is None and (row.expires_at is None or row.expires_at > now())
    if row is None or not usable or not credentials.matches(secret, row.secret_hash):
        raise Unauthorized("the API key is unknown, revoked or expired")
    return Caller(row.id, row.project_id, frozenset(row.scopes))


def use_is_stale(session: Session, key_id: str) -> bool:
    """Whether the moment of last use on record is more than a minute old."""
    used_at = session.scalar(select(ApiKey.last_used_at).where(ApiKey.id == key_id))
    return used_at is None or used_at < now() - _LAST_USED_STEP


def note_use(session: Session, key_id: str) -> None:
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=now()))


def identify_node(session: Session, credential: str) -> str:
    """The id of the node that a credential belongs to.

    Raises:
        Unauthorized: unknown, or its node was deleted.
    """
    node = session.scalar(select(Node).where(Node.credential_hash == credentials.hashed(credential)))
    if (
        node is None
        or node.deleted_at is not None
        or not credentials.matches(credential, node.credential_hash)
    ):
        raise Unauthorized(
            "the node's credential is unknown, or its node was deleted; join it with a new token"
        )
    return node.id


def install_admin_key(session: Session, given: str | None) -> str | None:
    """At the first start, install an admin key: the operator's own, or a new one.

    Returns:
        The new key, to be shown this once; null when one was given or exists already.
    """
    if given is not None:
        if session.scalar(select(ApiKey.id).where(ApiKey.secret_hash == credentials.hashed(given))) is None:
            session.add(_admin_key(given))
        return None
    if session.scalar(select(func.count()).select_from(ApiKey)):
        return None
    secret = f"mk_{token_urlsafe(32)}"
    session.add(_admin_key(secret))
    return secret


def _admin_key(secret: str) -> ApiKey:
    return ApiKey(
        id=new_id(ids.API_KEY), name="bootstrap admin", project_id=None, scopes=[ADMIN],
        secret_hash=credentials.hashed(secret), created_at=now(),
    )  # fmt: skip
