"""Idempotency keys: a POST's answer is stored with its effect, and a repeat returns it unchanged."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import ColumnElement, delete, func, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from mooring.control.tenants import storage
from mooring.control.tenants.encryption import Encryptor
from mooring.db.tables import IdempotencyKey, IdempotencyUsage
from mooring.db.types import now
from mooring_client.errors import IdempotencyInProgress, IdempotencyKeyReused, ReplayTooLarge

KEPT = timedelta(hours=24)
# A longer body is not stored: a repeat gets an error, and still has no effect.
MAX_BODY_BYTES: Final = 64 * 1024
# Nor is a body with which the stored answers of a caller, or of a project's API keys, would exceed these.
MAX_CALLER_BYTES: Final = 64 * 1024 * 1024
MAX_PROJECT_BYTES: Final = 256 * 1024 * 1024
# A request whose effect is not one transaction (an exec) is abandoned if it has no answer after this time:
# its replica died. The time is longer than the longest exec (an hour), which must not run twice.
ABANDONED = timedelta(minutes=70)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A response, replayed byte for byte."""

    status: int
    body: bytes
    headers: dict[str, str]
    sealed: bool = False


def claim(
    session: Session, encryptor: Encryptor, caller: str, key: str, fingerprint: str, kept: timedelta = KEPT
) -> StoredAnswer | None:
    """Claim the key for this request, or return the answer that is stored under the key.

    Of two concurrent requests, the second waits at the primary key for the first one's transaction.

    Raises:
        IdempotencyKeyReused: the key was used for another request.
        IdempotencyInProgress: the first request has not been answered yet.
        ReplayTooLarge: the first request took effect, but its answer was not stored.
    """
    _delete(session, (IdempotencyKey.caller == caller) & (IdempotencyKey.key == key) & _expired(kept))
    if _inserted(session, caller, key, fingerprint):
        return None
    row = session.scalar(
        select(IdempotencyKey).where(IdempotencyKey.caller == caller, IdempotencyKey.key == key)
    )
    if row is None or (row.fingerprint == fingerprint and row.status is None):
        raise IdempotencyInProgress(
            "the first request with this Idempotency-Key is still running; repeat it later"
        )
    if row.fingerprint != fingerprint:
        raise IdempotencyKeyReused("this Idempotency-Key was used for a different request; choose a new one")
    if row.body is None:
        raise _replay_too_large(row)
    body = encryptor.decrypt(row.body) if row.sealed else row.body
    return StoredAnswer(row.status or 200, body, dict(row.headers or {}))


def _replay_too_large(row: IdempotencyKey) -> ReplayTooLarge:
    location = (row.headers or {}).get("Location")
    return ReplayTooLarge(
        f"the first request with this Idempotency-Key was answered {row.status} and took effect; its "
        "answer was too large to store" + (f": read {location}" if location else ""),
        first_status=row.status,
        location=location,
    )


def _expired(kept: timedelta) -> ColumnElement[bool]:
    """Expired answers, and abandoned keys without an answer."""
    old = IdempotencyKey.status.is_not(None) & (IdempotencyKey.created_at < now() - kept)
    return old | (IdempotencyKey.status.is_(None) & (IdempotencyKey.created_at < now() - ABANDONED))


def _inserted(session: Session, caller: str, key: str, fingerprint: str) -> bool:
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    values = {"caller": caller, "key": key, "fingerprint": fingerprint, "created_at": now()}
    statement = insert(IdempotencyKey).values(values).on_conflict_do_nothing().returning(IdempotencyKey.key)
    return session.scalar(statement) is not None


def store(
    session: Session,
    encryptor: Encryptor,
    caller: str,
    key: str,
    answer: StoredAnswer,
    project_id: str | None = None,
) -> None:
    """Store the answer of a claimed key, without the body if that would exceed a limit.

    Args:
        project_id: the project of the caller's API key, if any.
    """
    row = session.get_one(IdempotencyKey, (caller, key))
    row.status, row.headers, row.sealed = answer.status, dict(answer.headers), answer.sealed
    row.project_id = project_id
    if len(answer.body) > MAX_BODY_BYTES:
        return
    body = encryptor.encrypt(answer.body) if answer.sealed else answer.body
    if _add_usage(session, caller, project_id, len(body)):
        row.body = body
        storage.add_answer(session, project_id, len(body))


def lock_usage(session: Session, holders: Iterable[str | None]) -> None:
    """Lock the counts of callers and projects before several answers are stored, so that none deadlock."""
    if session.get_bind().dialect.name == "postgresql":
        query = select(IdempotencyUsage.holder).where(IdempotencyUsage.holder.in_(set(filter(None, holders))))
        session.execute(query.order_by(IdempotencyUsage.holder).with_for_update()).all()


def _add_usage(session: Session, caller: str, project_id: str | None, stored: int) -> bool:
    """Count an answer for its caller and project. Returns false, and counts nothing, if one has no room."""
    limits = {caller: MAX_CALLER_BYTES}
    if project_id is not None:
        limits[project_id] = MAX_PROJECT_BYTES
    full = False
    for holder in sorted(limits):
        total = session.connection().scalar(_ADD, {"holder": holder, "stored": stored})
        full = full or total > limits[holder]
    if full:
        _subtract(session, dict.fromkeys(limits, stored))
    return not full


_ADD = text(
    """
    INSERT INTO idempotency_usage (holder, stored_bytes) VALUES (:holder, :stored)
    ON CONFLICT (holder) DO UPDATE SET stored_bytes = idempotency_usage.stored_bytes + :stored
    RETURNING stored_bytes
    """
)


def _subtract(session: Session, freed: Mapping[str, int]) -> None:
    if not freed:
        return
    usage = IdempotencyUsage
    for holder in sorted(freed):
        left = usage.stored_bytes - freed[holder]
        session.execute(update(usage).where(usage.holder == holder).values(stored_bytes=left))
    session.execute(delete(usage).where(usage.holder.in_(freed), usage.stored_bytes <= 0))


def abandon(session: Session, caller: str, key: str) -> None:
    """Delete a claimed key: its request failed without effect and may be repeated."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.caller == caller, IdempotencyKey.key == key))


def expired(session: Session, kept: timedelta, most: int) -> Sequence[tuple[str, str]]:
    """Keys that can be deleted, oldest first."""
    query = select(IdempotencyKey.caller, IdempotencyKey.key).where(_expired(kept))
    oldest = session.execute(query.order_by(IdempotencyKey.created_at).limit(most))
    return [(caller, key) for caller, key in oldest]


def forget(session: Session, keys: Sequence[tuple[str, str]], kept: timedelta) -> int:
    """Delete those of the keys that are still expired. Returns how many."""
    which = tuple_(IdempotencyKey.caller, IdempotencyKey.key).in_(keys)
    return _delete(session, which & _expired(kept))


def _delete(session: Session, which: ColumnElement[bool]) -> int:
    columns = (IdempotencyKey.caller, IdempotencyKey.project_id, func.length(IdempotencyKey.body))
    deleted = session.execute(delete(IdempotencyKey).where(which).returning(*columns)).all()
    freed: Counter[str] = Counter()
    for caller, project_id, stored in deleted:
        freed[caller] += stored or 0
        if project_id is not None:
            freed[project_id] += stored or 0
    _subtract(session, {holder: stored for holder, stored in freed.items() if stored})
    return len(deleted)
