"""API keys: who a caller is. Kept as hashes, looked up by index, compared in constant time (R19)."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from secrets import token_urlsafe
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select, true, update
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
    Role,
    key_permissions,
    lacking,
)
from mooring.core.errors import Forbidden, Invalid, NotFound, Unauthorized
from mooring.db.tables import ApiKey, Member, Node, Project, User
from mooring.db.types import new_id, now
from mooring.schemas.base import timestamp

_LAST_USED_STEP = timedelta(minutes=1)
_PREFIX_LENGTH = 9


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """What a new key should be; see `schemas/api_keys.py`."""

    name: str
    project_id: str | None
    user_id: str | None
    role: Role | None
    scopes: frozenset[Permission]
    expires_at: datetime | None


def identify(session: Session, secret: str) -> tuple[Caller, bool]:
    """Whose key this is, and whether its moment of last use on record is more than a minute old.

    Raises:
        Unauthorized: it is unknown, revoked or expired; which of them is not told.
    """
    row = session.scalar(select(ApiKey).where(ApiKey.secret_hash == credentials.hashed(secret)))
    if row is None or not _usable(row) or not credentials.matches(secret, row.secret_hash):
        raise _unknown()
    stale = row.last_used_at is None or row.last_used_at < now() - _LAST_USED_STEP
    return _caller(session, row), stale


def _usable(row: ApiKey) -> bool:
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
        role=row.role,
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
    """What a person may do at most with a key of theirs, as of now."""
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


def note_use(session: Session, key_id: str) -> None:
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=now()))


def create(session: Session, access: Access, asked: KeyRequest, default_project: str) -> tuple[ApiKey, str]:
    """A key and its secret, which is kept as a hash only.

    Raises:
        NotFound: no such project or user, as far as the caller may know.
        Forbidden: the key would do more than the caller may, or for longer, or be somebody else's.
        Invalid: it could do nothing, or mixes what a project's key can and cannot.
    """
    project_id = _project(access, asked, default_project)
    if project_id is not None:
        locks.live_project(session, project_id)
        row_limits.require_room(session, ApiKey, project_id)
    _refuse_more_than_own(access, project_id, key_permissions(asked.role, asked.scopes))
    if asked.user_id is None or asked.user_id != access.caller.user_id:
        _require_owner(access, project_id)
        _refuse_stranger(session, access, asked.user_id, project_id)
    else:
        _refuse_borrowed_role(session, asked.user_id, project_id)
    if not access.caller.may(Permission.OWN, project_id):
        _refuse_longer_than_own(session, access, asked.expires_at)
    if asked.expires_at is not None and asked.expires_at <= now():
        raise Invalid("expires_at lies in the past", code="expired")
    secret = f"mk_{token_urlsafe(32)}"
    row = _row(asked, project_id, secret)
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after=_described(row))
    return row, secret


def _project(access: Access, asked: KeyRequest, default: str) -> str | None:
    if asked.role is None and not asked.scopes:
        raise Invalid(
            "say what the key may do: role (viewer, member, owner), scopes, or both", code="no_permissions"
        )
    if not asked.scopes & SERVICE_WIDE:
        return access.project(asked.project_id, default)
    if asked.project_id is not None or asked.role is not None:
        wide = ", ".join(sorted(asked.scopes & SERVICE_WIDE))
        raise Invalid(
            f"a key with the scope {wide} belongs to no project: leave project_id and role out",
            code="scope_of_no_project",
        )
    return None


def _refuse_more_than_own(access: Access, project_id: str | None, held: frozenset[Permission]) -> None:
    for permission in sorted(held):
        if not access.caller.may(permission, project_id):
            raise lacking(permission)


def _require_owner(access: Access, project_id: str | None) -> None:
    if not access.caller.may(Permission.OWN, project_id):
        raise lacking(Permission.OWN)


def _refuse_longer_than_own(session: Session, access: Access, expires_at: datetime | None) -> None:
    """A key that ends must not leave another behind it; owners make keys for others, which may."""
    own = session.get(ApiKey, access.caller.id)
    if own is None or own.expires_at is None:
        return
    if expires_at is None or expires_at > own.expires_at:
        raise Forbidden(f"your own key expires at {timestamp(own.expires_at)}; one that it makes must too")


def _refuse_borrowed_role(session: Session, user_id: str, project_id: str | None) -> None:
    """A role that comes from a sign-on token ends with it; a key would then be able to do nothing."""
    user = session.get_one(User, user_id)
    if not user.is_admin and session.get(Member, (project_id, user_id)) is None:
        raise Invalid(
            "your role here comes from your organisation's sign-on alone; ask an owner to take you in as a "
            "member, then make the key",
            code="no_membership",
        )


def _refuse_stranger(session: Session, access: Access, user_id: str | None, project_id: str | None) -> None:
    """Only an admin makes keys in the name of an admin who is no member: owners could speak as them."""
    if user_id is None:
        return
    user = session.get(User, user_id)
    is_member = session.get(Member, (project_id, user_id)) is not None
    may_be_anywhere = user is not None and user.is_admin and access.caller.is_admin
    if user is None or user.deleted_at is not None or not (is_member or may_be_anywhere):
        raise NotFound(f"no user {user_id} in this project")


def _row(asked: KeyRequest, project_id: str | None, secret: str) -> ApiKey:
    return ApiKey(
        id=new_id(ids.API_KEY), name=asked.name, prefix=secret[:_PREFIX_LENGTH], project_id=project_id,
        user_id=asked.user_id, role=asked.role, scopes=sorted(asked.scopes),
        secret_hash=credentials.hashed(secret), created_at=now(), expires_at=asked.expires_at,
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
    """The keys that a caller may see: an owner all of the project's, everybody their own.

    A key, which an owner may have made for somebody else, sees that person's keys of its own project only.
    """
    if access.caller.is_admin:
        return true()
    owned = {project for project, held in access.caller.permissions.items() if Permission.OWN in held}
    mine = ApiKey.id == access.caller.id
    if access.caller.user_id is not None:
        theirs = ApiKey.user_id == access.caller.user_id
        if access.caller.kind == "key":
            theirs &= ApiKey.project_id.in_(access.caller.permissions)
        mine = or_(mine, theirs)
    return or_(mine, ApiKey.project_id.in_(owned))


def live() -> ColumnElement[bool]:
    return ApiKey.revoked_at.is_(None)


def get(session: Session, access: Access, key_id: str) -> ApiKey:
    """Raises NotFound: unknown, revoked, or somebody else's."""
    return _found(session, _visible_key(access, key_id), key_id)


def _visible_key(access: Access, key_id: str) -> Select[ApiKey]:
    return select(ApiKey).where(ApiKey.id == key_id, live(), visible(access))


def _found(session: Session, query: Select[ApiKey], key_id: str) -> ApiKey:
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"no API key {key_id}")
    return row


def revoke(session: Session, access: Access, key_id: str) -> None:
    """End a key for good; every replica refuses it within a second.

    Raises:
        NotFound: as `get`.
        Forbidden: it can do more than the caller's: a key to look with must not take the others away.
    """
    row = _found(session, _visible_key(access, key_id).with_for_update(), key_id)
    _refuse_more_than_own(access, row.project_id, _permissions_now(session, row))
    row.revoked_at = now()
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def revoke_all(session: Session, keys: ColumnElement[bool]) -> None:
    session.execute(update(ApiKey).where(keys, live()).values(revoked_at=now()))


def identify_node(session: Session, credential: str) -> str:
    """The id of the node that a credential belongs to.

    Raises:
        Unauthorized: unknown, or its node was deleted.
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
    asked = KeyRequest("bootstrap admin", None, None, None, frozenset({Permission.ADMIN}), None)
    row = _row(asked, None, secret)
    if not secret.startswith("mk_"):
        row.prefix = ""  # an operator's own key: its first characters may be half of a passphrase
    return row


def names(session: Session, project_ids: Iterable[str]) -> dict[str, str]:
    """Project id -> name."""
    query = select(Project.id, Project.name).where(Project.id.in_(set(project_ids)))
    return dict(session.execute(query).all())
