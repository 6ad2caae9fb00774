"""The audit log: who did what. Each row is written and signed in the transaction of the action (R32)."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from mooring.control.audit import signing_keys
from mooring.control.audit.row_size import bounded
from mooring.control.audit.signing_keys import KEY_FILE, AuditKeys, WrongAuditKey
from mooring.core import ids
from mooring.core.access import Access, on_host
from mooring.db.session import Database, Ending, at_end
from mooring.db.tables import AuditEntry, ControlPlane
from mooring.db.types import new_id, now

FIRST_HASH: Final = "0" * 64
# The action of the row that records a new signing key.
KEY_ACTION: Final = "audit.key"
_PENDING = "mooring.audit"
_KEYS = "mooring.audit_keys"


def record(
    session: Session,
    access: Access,
    target_id: str | None,
    project_id: str | None,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Record an action in this transaction. Actions of the service itself are not recorded.

    Args:
        before, after: the fields that the action changes, never with a secret's value or a part of `env`.
    """
    if (entry := entry_of(access, target_id, project_id, before=before, after=after)) is not None:
        add(session, entry)


def entry_of(
    access: Access,
    target_id: str | None,
    project_id: str | None,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """What `record` would record, as JSON, for an action whose outcome is known later. None: nothing."""
    if access.action is None:
        return None
    return {
        "actor": {
            "kind": access.caller.kind,
            "id": access.caller.id,
            "name": access.caller.name,
            "user_id": access.caller.user_id,
        },
        "address": access.address,
        "request_id": access.request_id,
        "action": access.action,
        "project_id": project_id,
        "target_id": target_id,
        "before": bounded(before),
        "after": bounded(after),
    }


def add(session: Session, entry: Mapping[str, Any]) -> None:
    """Record an entry of `entry_of` in this transaction."""
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, Ending.WITHOUT_LOCKS, _write)
    session.info[_PENDING].append({"id": new_id(ids.AUDIT_ENTRY), "at": now(), **entry})


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that differ, with their old and new values."""
    differ = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in differ}, {name: after[name] for name in differ}


def recorded(session: Session) -> int:
    """The number of actions that this transaction has recorded so far."""
    return len(session.info.get(_PENDING, ()))


# Built once and run on the connection, since it is part of every create.
_INSERT = insert(AuditEntry.__table__)  # type: ignore[arg-type]


def _write(session: Session) -> None:
    """Insert the rows, each signed on its own. No lock is taken, so transactions do not wait for each other.

    `control/audit/chains.py` chains them after the commit.
    """
    keys: AuditKeys = session.info[_KEYS]
    entries = session.info.pop(_PENDING)
    for entry in entries:
        entry["previous_hash"], entry["hash"] = "", keys.sign(signing_keys.row_text(entry))
    session.connection().execute(_INSERT, entries)


def sign_with(database: Database, keys: AuditKeys) -> None:
    """Sign the actions that this database's sessions record with these keys."""
    database.session_info[_KEYS] = keys


def start(session: Session, keys: AuditKeys) -> None:
    """Check at startup that one of the keys signed the log. Record the first key and each new one in the log.

    The row of the first key has the last hash of the chain that older releases wrote without a key, so that
    changes to that chain are found.

    Raises:
        WrongAuditKey: the log is signed with another key.
    """
    control_plane = session.scalars(select(ControlPlane)).one()
    known = control_plane.audit_key_id
    if known == keys.newest_id:
        return
    if known is not None and known not in keys.ids:
        raise WrongAuditKey(
            f"the audit log is signed with another key ({known}): with this one its rows look forged. "
            f"Append the old key to MOORING_AUDIT_KEYS, after a comma, or copy the "
            f"old {KEY_FILE} into this server's data directory"
        )
    after: dict[str, Any] = {"key": keys.newest_id}
    if known is None:
        after |= {
            "unkeyed_rows": _row_count(session),
            "unkeyed_head": session.scalar(_LAST_HASH) or FIRST_HASH,
        }
    before = None if known is None else {"key": known}
    record(session, on_host(KEY_ACTION), control_plane.id, None, before=before, after=after)
    control_plane.audit_key_id = keys.newest_id


def require_known(session: Session, keys: AuditKeys | None) -> AuditKeys:
    """The keys, if the log is signed with one of them. For commands that run without the server.

    Raises:
        WrongAuditKey: none of them signed the log, or no server of this release has started yet.
    """
    known = session.scalars(select(ControlPlane.audit_key_id)).one_or_none()
    if known is None:
        raise WrongAuditKey("the audit log has no key yet; start the server first")
    if keys is None or known not in keys.ids:
        raise WrongAuditKey(
            f"the audit log is signed with the key {known}, which is not here: run this with the server's "
            f"MOORING_AUDIT_KEYS, or with its MOORING_DATA_DIR, which contains {KEY_FILE}"
        )
    return keys


_LAST_HASH = select(AuditEntry.hash).order_by(AuditEntry.seq.desc()).limit(1)


def _row_count(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(AuditEntry)) or 0
