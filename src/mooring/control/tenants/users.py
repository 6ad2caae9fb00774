"""Users: the people who have memberships and personal API keys."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import concurrency
from mooring.control.audit import audit_log
from mooring.control.tenants import api_keys
from mooring.core import ids
from mooring.core.access import Access
from mooring.db.tables import ApiKey, Member, SshKey, User
from mooring.db.types import new_id, now
from mooring_client.errors import EmailTaken, NotFound


def create(session: Session, access: Access, name: str, email: str | None, *, is_admin: bool) -> User:
    """Raises EmailTaken."""
    _require_free_email(session, email)
    row = User(id=new_id(ids.USER), name=name, email=email, is_admin=is_admin, version=1, created_at=now())
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, None, after=_described(row))
    return row


def _require_free_email(session: Session, email: str | None) -> None:
    if email is None:
        return
    if session.scalar(select(User.id).where(User.email == email, User.deleted_at.is_(None))):
        raise EmailTaken(f"a user with the e-mail {email} exists")


def get(session: Session, user_id: str) -> User:
    """Raises NotFound."""
    row = session.get(User, user_id)
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no user {user_id}")
    return row


def _locked(session: Session, user_id: str) -> User:
    row = session.scalar(select(User).where(User.id == user_id).with_for_update())
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no user {user_id}")
    return row


def patch(
    session: Session, access: Access, user_id: str, changes: Mapping[str, Any], if_match: int | None
) -> User:
    """Raises NotFound, PreconditionFailed, EmailTaken."""
    row = _locked(session, user_id)
    concurrency.require_current_version("user", row.version, if_match)
    before = _described(row)
    if changes.get("email", row.email) != row.email:
        _require_free_email(session, changes["email"])
    for field, value in changes.items():
        setattr(row, field, value)
    row.version += 1
    was, became = audit_log.changes(before, _described(row))
    audit_log.record(session, access, row.id, None, before=was, after=became)
    return row


def _described(row: User) -> dict[str, Any]:
    return {"name": row.name, "email": row.email, "is_admin": row.is_admin}


def delete(session: Session, access: Access, user_id: str, if_match: int | None) -> None:
    """Delete a user with their keys and memberships. Instances keep running, since they belong to projects.

    Raises:
        NotFound, PreconditionFailed.
    """
    row = _locked(session, user_id)
    concurrency.require_current_version("user", row.version, if_match)
    api_keys.revoke_all(session, ApiKey.user_id == user_id)
    session.execute(sql_delete(SshKey).where(SshKey.user_id == user_id))
    session.execute(sql_delete(Member).where(Member.user_id == user_id))
    row.deleted_at = now()
    audit_log.record(session, access, row.id, None, before=_described(row))
