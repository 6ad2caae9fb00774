"""The audit log: who did what, written and signed in the transaction of the action (R32)."""

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
# The row that records with which key the log is signed from there on.
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
    """Write down the deed of this transaction; what the service does by itself is no deed.

    Args:
        before, after: the fields that the deed changes. Never a secret's value, nor anything of `env`.
    """
    if access.action is None:
        return
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, Ending.WITHOUT_LOCKS, _write)
    session.info[_PENDING].append(
        {
            "id": new_id(ids.AUDIT_ENTRY),
            "at": now(),
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
    )


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two descriptions of one thing, the fields that differ."""
    differ = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in differ}, {name: after[name] for name in differ}


def recorded(session: Session) -> int:
    """How many deeds this transaction has written down so far."""
    return len(session.info.get(_PENDING, ()))


# Made once, and run on the connection: every create waits for it.
_INSERT = insert(AuditEntry.__table__)  # type: ignore[arg-type]


def _write(session: Session) -> None:
    """Insert the rows, each signed by itself: no lock is taken, so transactions do not wait for one another.

    `control/audit/chains.py` chains them once they are committed.
    """
    keys: AuditKeys = session.info[_KEYS]
    entries = session.info.pop(_PENDING)
    for entry in entries:
        entry["previous_hash"], entry["hash"] = "", keys.sign(signing_keys.row_text(entry))
    session.connection().execute(_INSERT, entries)


def sign_with(database: Database, keys: AuditKeys) -> None:
    """From now on, what this database's sessions record is signed with these keys."""
    database.session_info[_KEYS] = keys


def start(session: Session, keys: AuditKeys) -> None:
    """At each start: is this the key that the database knows? A new key, and the first one, are recorded.

    The row of the first key commits to the unkeyed chain of older releases, which from then on cannot be
    computed anew without contradicting it.

    Raises:
        WrongAuditKey: the log is signed with another one.
    """
    control_plane = session.scalars(select(ControlPlane)).one()
    known = control_plane.audit_key_id
    if known == keys.newest_id:
        return
    if known is not None and known not in keys.ids:
        raise WrongAuditKey(
            f"the audit log is signed with another key ({known}): its rows could not be told from forged "
            f"ones. Put the old key into MOORING_AUDIT_KEYS (after a comma, behind the new one), or copy the "
            f"old {KEY_FILE} into this server's data directory"
        )
    after: dict[str, Any] = {"key": keys.newest_id}
    if known is None:
        after |= {"unkeyed_rows": _count(session), "unkeyed_head": session.scalar(_LAST_HASH) or FIRST_HASH}
    before = None if known is None else {"key": known}
    record(session, on_host(KEY_ACTION), control_plane.id, None, before=before, after=after)
    control_plane.audit_key_id = keys.newest_id


def require_known(session: Session, keys: AuditKeys | None) -> AuditKeys:
    """The keys, if the log is signed with one of them; for commands beside a server.

    Raises:
        WrongAuditKey: it is not, or no server of this release has been started yet.
    """
    known = session.scalars(select(ControlPlane.audit_key_id)).one_or_none()
    if known is None:
        raise WrongAuditKey("the audit log has no key yet; start the server first")
    if keys is None or known not in keys.ids:
        raise WrongAuditKey(
            f"the audit log is signed with the key {known}, which is not here: run this with the server's "
            f"MOORING_AUDIT_KEYS, or with its MOORING_DATA_DIR, where {KEY_FILE} lies"
        )
    return keys


_LAST_HASH = select(AuditEntry.hash).order_by(AuditEntry.seq.desc()).limit(1)


def _count(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(AuditEntry)) or 0
