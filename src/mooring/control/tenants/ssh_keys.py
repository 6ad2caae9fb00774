"""SSH keys. Each acts as the credential that registered it (`ssh_holders`)."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, func, or_, select, true, update
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.tenants import api_keys, ssh_holders
from mooring.control.tenants.ssh_holders import Holder
from mooring.core import ids, ssh_public_keys
from mooring.core.access import Access, Caller, Permission
from mooring.db.tables import ApiKey, SshKey
from mooring.db.types import new_id, now
from mooring_client.errors import (
    ExpiryInPast,
    NotFound,
    SshKeyExists,
    TooManyRows,
    Unauthorized,
)

LIMIT: Final = 100
_LAST_USED_STEP: Final = timedelta(minutes=1)


def create(
    session: Session,
    access: Access,
    name: str,
    public_key: str,
    project_id: str | None,
    expires_at: datetime | None,
) -> SshKey:
    """Register a key.

    Args:
        project_id: the only project in which the key may be used; null: all of the caller's.

    Raises:
        NotFound, Forbidden: the caller may not run commands in the project.
        NoMembership: as `ssh_holders.locked`.
        InvalidPublicKey: as `ssh_public_keys.parse`.
        ExpiryInPast, SshKeyExists, TooManyRows.
    """
    holder = Holder.of_access(access, project_id)
    if expires_at is not None and expires_at <= now():
        raise ExpiryInPast("expires_at lies in the past")
    key = ssh_public_keys.parse(public_key)
    ssh_holders.locked(session, holder)
    row = SshKey(
        id=new_id(ids.SSH_KEY), name=name, public_key=key.text, fingerprint=key.fingerprint,
        api_key_id=holder.id if holder.is_api_key else None,
        user_id=None if holder.is_api_key else holder.id,
        project_id=holder.project_id, created_at=now(), expires_at=expires_at,
    )  # fmt: skip
    _require_room(session, row)
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, row.project_id, after=_described(row))
    return row


def _require_room(session: Session, row: SshKey) -> None:
    """Raises SshKeyExists, TooManyRows. Exact, because the caller has locked the credential."""
    same = SshKey.user_id == row.user_id if row.api_key_id is None else SshKey.api_key_id == row.api_key_id
    known = session.scalar(select(SshKey.id).where(same, SshKey.fingerprint == row.fingerprint))
    if known is not None:
        raise SshKeyExists(f"you have registered this key as {known}; delete that to change it", id=known)
    if (session.scalar(select(func.count()).select_from(SshKey).where(same)) or 0) >= LIMIT:
        raise TooManyRows(f"you can have {LIMIT} SSH keys; delete what is not used")


def _described(row: SshKey) -> dict[str, Any]:
    return {
        "name": row.name,
        "fingerprint": row.fingerprint,
        "expires_at": row.expires_at.isoformat() if row.expires_at else None,
    }


def visible(access: Access) -> ColumnElement[bool]:
    """The keys that a caller may see: their own, owners also those of their projects."""
    if access.caller.is_admin:
        return true()
    owned = {project for project, held in access.caller.permissions.items() if Permission.OWN in held}
    shown: list[ColumnElement[bool]] = [
        SshKey.project_id.in_(owned),
        SshKey.api_key_id.in_(select(ApiKey.id).where(api_keys.visible(access))),
    ]
    if access.caller.kind == "user":
        shown.append(SshKey.user_id == access.caller.user_id)
    return or_(*shown)


def get(session: Session, access: Access, key_id: str) -> SshKey:
    """Raises NotFound: it is unknown, or not visible to the caller."""
    return _found(session.scalar(select(SshKey).where(SshKey.id == key_id, visible(access))), key_id)


def _found(row: SshKey | None, key_id: str) -> SshKey:
    if row is None:
        raise NotFound(f"no SSH key {key_id}")
    return row


def usable(session: Session, access: Access) -> Sequence[SshKey]:
    """The unexpired keys that act as the caller's credential in all of its projects, newest first."""
    holder = Holder.of_access(access, None)
    own = SshKey.api_key_id == holder.id if holder.is_api_key else SshKey.user_id == holder.id
    everywhere = or_(SshKey.project_id.is_(None), SshKey.project_id == holder.project_id)
    lives = or_(SshKey.expires_at.is_(None), SshKey.expires_at > now())
    return session.scalars(select(SshKey).where(own, everywhere, lives).order_by(SshKey.id.desc())).all()


def delete(session: Session, access: Access, key_id: str) -> None:
    """Delete a key. Its open connections end within 5 seconds.

    Raises:
        NotFound: as `get`.
    """
    query = select(SshKey).where(SshKey.id == key_id, visible(access)).with_for_update()
    row = _found(session.scalar(query), key_id)
    session.delete(row)
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def matching(session: Session, fingerprint: str) -> list[str]:
    """The ids of the rows of a public key that are valid now: several credentials may register one key."""
    found = []
    for row in session.scalars(select(SshKey).where(SshKey.fingerprint == fingerprint).order_by(SshKey.id)):
        try:
            _caller(session, row)
        except Unauthorized:
            continue
        found.append(row.id)
    return found


def caller_of(session: Session, key_id: str) -> Caller:
    """Raises Unauthorized: the key is deleted or expired, or what registered it has ended."""
    row = session.get(SshKey, key_id)
    if row is None:
        raise Unauthorized("the SSH key was deleted")
    return _caller(session, row)


def _caller(session: Session, row: SshKey) -> Caller:
    if row.expires_at is not None and row.expires_at <= now():
        raise Unauthorized("the SSH key has expired")
    return ssh_holders.caller_of(session, Holder(row.api_key_id or row.user_id or "", row.project_id))


def record_use(session: Session, key_id: str) -> None:
    """Record that the key was used now, unless a use was recorded in the last minute."""
    is_due = or_(SshKey.last_used_at.is_(None), SshKey.last_used_at < now() - _LAST_USED_STEP)
    session.execute(update(SshKey).where(SshKey.id == key_id, is_due).values(last_used_at=now()))
