"""API keys. Stored as hashes, looked up by index, compared in constant time (R19)."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from secrets import token_urlsafe
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select, true, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit import audit_log
from mooring.control.tenants import row_limits
from mooring.core import credentials, ids
from mooring.core.access import (
    NONE,
    ROLE_PERMISSIONS,
    SERVICE_WIDE,
    Access,
    Caller,
    Permission,
    key_permissions,
    lacking,
)
from mooring.db.tables import ApiKey, Member, Node, Project, SshKey, User
from mooring.db.types import new_id, now
from mooring_client.errors import (
    ExpiryInPast,
    Forbidden,
    NoMembership,
    NoPermissions,
    NotFound,
    ScopeOfNoProject,
    Unauthorized,
)
from mooring_client.schemas.base import timestamp
from mooring_client.schemas.projects import Role

_LAST_USED_STEP = timedelta(minutes=1)
_PREFIX_LENGTH = 9


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """The fields of a new key; see `schemas/api_keys.py`."""

    name: str
    project_id: str | None
    user_id: str | None
    role: Role | None
    scopes: frozenset[Permission]
    expires_at: datetime | None


def identify(session: Session, secret: str) -> tuple[Caller, bool]:
    """The key's caller, and whether to record the use, since none was recorded in the last minute.

    Raises:
        Unauthorized: it is unknown, revoked or expired; the error does not say which.
    """
    row = session.scalar(select(ApiKey).where(ApiKey.secret_hash == credentials.hashed(secret)))
    if row is None or not _is_valid(row) or not credentials.matches(secret, row.secret_hash):
        raise _unknown()
    must_record = row.last_used_at is None or row.last_used_at < now() - _LAST_USED_STEP
    return _caller(session, row), must_record


def exists(session: Session, secret: str) -> bool:
    """Whether the secret is or was a key."""
    return (
        session.scalar(select(ApiKey.id).where(ApiKey.secret_hash == credentials.hashed(secret))) is not None
    )


def caller_of(session: Session, key_id: str) -> Caller:
    """The caller of a key. Raises Unauthorized: it is revoked or expired."""
    row = session.get(ApiKey, key_id)
    if row is None or not _is_valid(row):
        raise _unknown()
    return _caller(session, row)


def _is_valid(row: ApiKey) -> bool:
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now())


def _unknown() -> Unauthorized:
    return Unauthorized("the API key is unknown, revoked or expired")


def _caller(session: Session, row: ApiKey) -> Caller:
    held = _permissions_now(session, row)
    return Caller(
        id=row.id,
        kind="key",
        name=row.name,
        user_id=row.user_id,
        project_id=row.project_id,
        permissions={row.project_id: held} if row.project_id else {},
        everywhere=NONE if row.project_id else held,
    )


def _permissions_now(session: Session, row: ApiKey) -> frozenset[Permission]:
    held = permissions_of(row)
    if row.user_id is None:
        return held
    return held & _users_permissions(session, row.user_id, row.project_id)


def permissions_of(row: ApiKey) -> frozenset[Permission]:
    return key_permissions(row.role, frozenset(Permission(scope) for scope in row.scopes))


def _users_permissions(session: Session, user_id: str, project_id: str | None) -> frozenset[Permission]:
    """The most that a user's key may do now."""
    user = session.get(User, user_id)
    if user is None or user.deleted_at is not None:
        raise _unknown()
    if user.is_admin:
        return frozenset(Permission)
    if project_id is None:
        return NONE
    role = session.scalar(
        select(Member.role).where(Member.project_id == project_id, Member.user_id == user_id)
    )
    return ROLE_PERMISSIONS[role] if role else NONE


def record_use(session: Session, key_id: str) -> None:
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=now()))


def create(session: Session, access: Access, request: KeyRequest, default_project: str) -> tuple[ApiKey, str]:
    """Create a key. Returns it with its secret, which is stored as a hash only.

    Raises:
        NotFound: no such project or user that the caller may see.
        Forbidden: the key could do more, or last longer, than the caller's, or be for another user.
        Invalid: codes `no_permissions`, `scope_of_no_project`, `no_membership`, `expired`.
    """
    project_id = _project(access, request, default_project)
    if project_id is not None:
        locks.live_project(session, project_id)
        row_limits.require_room(session, ApiKey, project_id)
    _require_own_permissions(access, project_id, key_permissions(request.role, request.scopes))
    if request.user_id is None or request.user_id != access.caller.user_id:
        _require_owner(access, project_id)
        _require_member(session, access, request.user_id, project_id)
    else:
        _require_own_membership(session, request.user_id, project_id)
    if not access.caller.may(Permission.OWN, project_id):
        _require_own_expiry(session, access, request.expires_at)
    if request.expires_at is not None and request.expires_at <= now():
        raise ExpiryInPast("expires_at lies in the past")
    secret = f"mk_{token_urlsafe(32)}"
    row = _row(request, project_id, secret)
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after=_described(row))
    return row, secret


def _project(access: Access, request: KeyRequest, default: str) -> str | None:
    if request.role is None and not request.scopes:
        raise NoPermissions("say what the key may do: role (viewer, member, owner), scopes, or both")
    if not request.scopes & SERVICE_WIDE:
        return access.project(request.project_id, default)
    if request.project_id is not None or request.role is not None:
        wide = ", ".join(sorted(request.scopes & SERVICE_WIDE))
        raise ScopeOfNoProject(
            f"a key with the scope {wide} belongs to no project: leave project_id and role out"
        )
    return None


def _require_own_permissions(access: Access, project_id: str | None, held: frozenset[Permission]) -> None:
    for permission in sorted(held):
        if not access.caller.may(permission, project_id):
            raise lacking(permission)


def _require_owner(access: Access, project_id: str | None) -> None:
    if not access.caller.may(Permission.OWN, project_id):
        raise lacking(Permission.OWN)


def _require_own_expiry(session: Session, access: Access, expires_at: datetime | None) -> None:
    """A key that expires must not create one that lasts longer. Owners, who create keys for others, may."""
    own = session.get(ApiKey, access.caller.id)
    if own is None or own.expires_at is None:
        return
    if expires_at is None or expires_at > own.expires_at:
        raise Forbidden(
            f"your own key expires at {timestamp(own.expires_at)}; it cannot create one that lasts longer"
        )


def _require_own_membership(session: Session, user_id: str, project_id: str | None) -> None:
    """A role from a sign-on token ends with the token, which would leave the key without permissions."""
    user = session.get_one(User, user_id)
    if not user.is_admin and session.get(Member, (project_id, user_id)) is None:
        raise NoMembership(
            "your role here comes only from your organisation's sign-on; ask an owner to add you as a "
            "member, then create the key",
        )


def _require_member(session: Session, access: Access, user_id: str | None, project_id: str | None) -> None:
    """Only admins create keys for an admin who is not a member; otherwise owners could act as that admin."""
    if user_id is None:
        return
    user = session.get(User, user_id)
    is_member = session.get(Member, (project_id, user_id)) is not None
    may_be_anywhere = user is not None and user.is_admin and access.caller.is_admin
    if user is None or user.deleted_at is not None or not (is_member or may_be_anywhere):
        raise NotFound(f"no user {user_id} in this project")


def _row(request: KeyRequest, project_id: str | None, secret: str) -> ApiKey:
    return ApiKey(
        id=new_id(ids.API_KEY), name=request.name, prefix=secret[:_PREFIX_LENGTH], project_id=project_id,
        user_id=request.user_id, role=request.role, scopes=sorted(request.scopes),
        secret_hash=credentials.hashed(secret), created_at=now(), expires_at=request.expires_at,
    )  # fmt: skip


def _described(row: ApiKey) -> dict[str, Any]:
    return {
        "name": row.name,
        "prefix": row.prefix,
        "user_id": row.user_id,
        "role": row.role,
        "scopes": row.scopes,
        "expires_at": row.expires_at.isoformat() if row.expires_at else None,
    }


def visible(access: Access) -> ColumnElement[bool]:
    """The keys that a caller may see: owners see all keys of their projects, other callers their own keys.

    If the caller is a key, "own" means the keys of the same user in the same project, since an owner may have
    created that key for another user.
    """
    if access.caller.is_admin:
        return true()
    owned = {project for project, held in access.caller.permissions.items() if Permission.OWN in held}
    own = ApiKey.id == access.caller.id
    if access.caller.user_id is not None:
        of_user = ApiKey.user_id == access.caller.user_id
        if access.caller.kind == "key":
            of_user &= ApiKey.project_id.in_(access.caller.permissions)
        own = or_(own, of_user)
    return or_(own, ApiKey.project_id.in_(owned))


def not_revoked() -> ColumnElement[bool]:
    return ApiKey.revoked_at.is_(None)


def get(session: Session, access: Access, key_id: str) -> ApiKey:
    """Raises NotFound: it is unknown, revoked, or not visible to the caller."""
    return _found(session, _visible_key(access, key_id), key_id)


def _visible_key(access: Access, key_id: str) -> Select[ApiKey]:
    return select(ApiKey).where(ApiKey.id == key_id, not_revoked(), visible(access))


def _found(session: Session, query: Select[ApiKey], key_id: str) -> ApiKey:
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"no API key {key_id}")
    return row


def revoke(session: Session, access: Access, key_id: str) -> None:
    """Revoke a key, and delete the SSH keys that it registered. Every replica rejects it within a second.

    Raises:
        NotFound: as `get`.
        Forbidden: it can do more than the caller: a read-only key must not revoke others.
    """
    row = _found(session, _visible_key(access, key_id).with_for_update(), key_id)
    _require_own_permissions(access, row.project_id, _permissions_now(session, row))
    row.revoked_at = now()
    session.execute(sql_delete(SshKey).where(SshKey.api_key_id == row.id))
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def revoke_all(session: Session, keys: ColumnElement[bool]) -> None:
    """Revoke keys, and delete the SSH keys that they registered."""
    session.execute(sql_delete(SshKey).where(SshKey.api_key_id.in_(select(ApiKey.id).where(keys))))
    session.execute(update(ApiKey).where(keys, not_revoked()).values(revoked_at=now()))


def identify_node(session: Session, credential: str) -> str:
    """The id of the node that a credential belongs to.

    Raises:
        Unauthorized: it is unknown, or its node was deleted.
    """
    hashed = credentials.hashed(credential)
    present, following = Node.credential_hash == hashed, Node.next_credential_hash == hashed
    node = session.scalar(select(Node).where(present | following))
    if node is None or node.deleted_at is not None:
        raise Unauthorized(
            "the node's credential is unknown, or its node was deleted; join it with a new token"
        )
    return node.id


def install_admin_key(session: Session, given: str | None) -> str | None:
    """Install the operator's admin key if it is not there; without one, a new key at the first start.

    Returns:
        The new key, to be shown once; None if a key was given or any exists already.
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
    request = KeyRequest("bootstrap admin", None, None, None, frozenset({Permission.ADMIN}), None)
    row = _row(request, None, secret)
    if not secret.startswith("mk_"):
        row.prefix = ""  # the operator's own key: its start may be half of a passphrase
    return row


def project_names(session: Session, project_ids: Iterable[str]) -> dict[str, str]:
    """Project id -> name."""
    query = select(Project.id, Project.name).where(Project.id.in_(set(project_ids)))
    return dict(session.execute(query).all())
