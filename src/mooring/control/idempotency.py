"""Idempotency keys: a POST's answer, stored with its effect, so that a repeat gives it back unchanged."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from mooring.control.sealing import Sealer
from mooring.core.errors import IdempotencyInProgress, IdempotencyKeyReused
from mooring.db.tables import IdempotencyKey
from mooring.db.types import now

KEPT = timedelta(hours=24)
# An act that outlived its transaction (an exec) and never stored an answer: its replica died.
# The longest exec, an hour, must not be taken for one of those and run a second time.
ABANDONED = timedelta(minutes=70)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as it goes out: replayed byte for byte."""

    status: int
    body: bytes
    headers: dict[str, str]
    sealed: bool = False


def claim(session: Session, sealer: Sealer, caller: str, key: str, fingerprint: str) -> Answer | None:
    """Take the key for this request, or give back the answer it already has.

    Two requests with one key meet at the primary key: the second waits for the first one's transaction.

    Raises:
        IdempotencyKeyReused: the key was used for another request.
        IdempotencyInProgress: the first request has not been answered yet.
    """
    _forget_old(session, caller, key)
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
    body = row.body or b""
    return Answer(row.status or 200, sealer.open(body) if row.sealed else body, dict(row.headers or {}))


def _forget_old(session: Session, caller: str, key: str) -> None:
    mine = (IdempotencyKey.caller == caller) & (IdempotencyKey.key == key)
    old = IdempotencyKey.created_at < now() - KEPT
    abandoned = IdempotencyKey.status.is_(None) & (IdempotencyKey.created_at < now() - ABANDONED)
    session.execute(delete(IdempotencyKey).where(mine, old | abandoned))


def _inserted(session: Session, caller: str, key: str, fingerprint: str) -> bool:
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    values = {"caller": caller, "key": key, "fingerprint": fingerprint, "created_at": now()}
    statement = insert(IdempotencyKey).values(values).on_conflict_do_nothing().returning(IdempotencyKey.key)
    return session.scalar(statement) is not None


def store(session: Session, sealer: Sealer, caller: str, key: str, answer: Answer) -> None:
    """Keep the answer of a claimed key."""
    row = session.get_one(IdempotencyKey, (caller, key))
    row.status, row.headers, row.sealed = answer.status, dict(answer.headers), answer.sealed
    row.body = sealer.seal(answer.body) if answer.sealed else answer.body


def abandon(session: Session, caller: str, key: str) -> None:
    """Give a claimed key back: its act failed without effect, and may be repeated."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.caller == caller, IdempotencyKey.key == key))


def forget_expired(session: Session) -> None:
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < now() - KEPT))
