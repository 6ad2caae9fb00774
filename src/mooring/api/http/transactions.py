"""Operations that write: one transaction, one audit row, and one answer per Idempotency-Key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http.responses import respond
from mooring.control import idempotency
from mooring.control.audit import audit_log
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import storage
from mooring.core.access import Access


@dataclass(frozen=True, slots=True)
class Call:
    """A POST that may carry an Idempotency-Key."""

    access: Access
    idempotency_key: str | None
    fingerprint: str


async def _call(
    request: Request,
    context: Ctx,
    access: CurrentAccess,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            pattern=r"^[\x21-\x7e]+$",
            description="a repeated request with the same key gets the first response again, for 24 h. "
            "Responses over 64 KiB are not stored: 409 `replay_too_large`",
        ),
    ] = None,
) -> Call:
    if idempotency_key is None:
        return Call(access, None, "")
    head = f"{request.method} {request.scope['path']}?".encode() + request.scope["query_string"] + b"\n"
    return Call(access, idempotency_key, context.encryptor.fingerprint(head + await request.body()))


CurrentCall = Annotated[Call, Depends(_call)]
Operation = Callable[[Session], StoredAnswer]


def idempotent(context: Context, call: Call, operation: Operation) -> Response:
    """Run the operation, its audit row and its stored answer in one transaction, or replay its answer."""
    if call.idempotency_key is None:
        return audited(context, call.access, operation)
    with context.database.write() as session:
        stored = claim(context, session, call)
        if stored is not None:
            return respond(stored, replayed=True)
        answer = _audited(session, call.access, operation)
        store(context, session, call, answer)
    # Respond after the commit: a failed transaction must not be acknowledged.
    return respond(answer)


def audited(context: Context, access: Access, operation: Operation) -> Response:
    """Run an operation that is safe to repeat, in one transaction with its audit row."""
    with context.database.write() as session:
        answer = _audited(session, access, operation)
        storage.enforce(session, context.storage_limits)
    return respond(answer)


def claim(context: Context, session: Session, call: Call) -> StoredAnswer | None:
    """Claim the key of a call that has one; see `idempotency.claim`."""
    ttl, key = context.settings.idempotency_kept, call.idempotency_key or ""
    return idempotency.claim(session, context.encryptor, call.access.caller.id, key, call.fingerprint, ttl)


def store(context: Context, session: Session, call: Call, answer: StoredAnswer) -> None:
    """Store the answer under the key of a call that has one, and charge the project for what was written.

    Raises, at the end of the transaction:
        QuotaExceeded, DailyWriteLimit: as `storage.enforce`.
    """
    caller, key = call.access.caller, call.idempotency_key or ""
    idempotency.store(session, context.encryptor, caller.id, key, answer, caller.project_id)
    storage.enforce(session, context.storage_limits)


def _audited(session: Session, access: Access, operation: Operation) -> StoredAnswer:
    answer = operation(session)
    if audit_log.recorded(session) != 1:
        raise AssertionError(f"{access.action} must write exactly one row of the audit log")
    return answer
