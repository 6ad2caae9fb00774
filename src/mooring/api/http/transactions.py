"""Operations that write: one transaction, one audit row, and one answer per Idempotency-Key."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, Final

from fastapi import Depends, Header
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http.batches import Batches
from mooring.api.http.responses import respond
from mooring.control import idempotency, locks
from mooring.control.audit import audit_log
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import storage
from mooring.core.access import Access
from mooring.db import failures
from mooring_client.errors import MooringError

log = logging.getLogger(__name__)


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

# While one batch commits, PostgreSQL runs the statements of the next. SQLite has one writer.
_MAX_CONCURRENT_BATCHES: Final = 2
Operation = Callable[[Session], StoredAnswer]


def idempotent(context: Context, call: Call, operation: Operation) -> Response:
    """Run the operation, its audit row and its stored answer in one transaction, or replay its answer."""
    if call.idempotency_key is None:
        return audited(context, call.access, operation)
    with context.database.write() as session:
        stored = claim(context, session, call)
        if stored is not None:
            return respond(stored, replayed=True)
        answer = perform(session, call.access, operation)
        store(context, session, call, answer)
    # Respond after the commit: a failed transaction must not be acknowledged.
    return respond(answer)


def audited(context: Context, access: Access, operation: Operation) -> Response:
    """Run an operation that is safe to repeat, in one transaction with its audit row."""
    with context.database.write() as session:
        answer = perform(session, access, operation)
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


def perform(session: Session, access: Access, operation: Operation) -> StoredAnswer:
    """Run an operation, and check that it records itself in the audit log."""
    recorded = audit_log.recorded(session)
    answer = operation(session)
    if audit_log.recorded(session) != recorded + 1:
        raise AssertionError(f"{access.action} must write exactly one row of the audit log")
    return answer


@dataclass(frozen=True, eq=False, slots=True)
class BatchedRequest:
    """A request whose operation may share a transaction with others; it must raise before it writes.

    Attributes:
        instance_id: the only instance that the operation locks, with `locks.instance`; None: it locks none.
    """

    call: Call
    operation: Operation
    instance_id: str | None = None

    @property
    def project(self) -> str:
        caller = self.call.access.caller
        return caller.project_id or caller.id

    @property
    def key(self) -> tuple[str, str] | None:
        """Its caller and Idempotency-Key. A second request with them waits for the first one's answer."""
        key = self.call.idempotency_key
        return None if key is None else (self.call.access.caller.id, key)


Result = Response | Exception


async def batched(context: Context, call: Call, operation: Operation) -> Response:
    """As `idempotent`, in a transaction together with concurrent requests.

    Args:
        operation: must raise any MooringError before it writes.
    """
    return await _run(context, context.creates, BatchedRequest(call, operation))


async def batched_delete(
    context: Context, access: Access, instance_id: str, operation: Operation
) -> Response:
    """As `audited`, in a transaction together with concurrent deletes.

    Args:
        operation: must lock no instance but this one, and must raise any MooringError before it writes.
    """
    request = BatchedRequest(Call(access, None, ""), operation, instance_id)
    return await _run(context, context.deletes, request)


async def _run(context: Context, batches: Batches[BatchedRequest], request: BatchedRequest) -> Response:
    max_concurrent = 1 if context.database.is_sqlite else _MAX_CONCURRENT_BATCHES
    return await batches.run(request, partial(run_batch, context), max_concurrent)


def run_batch(context: Context, batch: Sequence[BatchedRequest]) -> Sequence[Result]:
    """Run requests in one transaction. If it fails, run each alone: none fails because of another."""
    if len(batch) > 1:
        try:
            return _together(context, batch)
        except Exception as error:
            if failures.is_unavailable(error) and not _has_sqlstate(error):
                return [error] * len(batch)  # each of them alone would fail too
            log.info(
                "a batch of %d requests failed, so each runs alone: %s", len(batch), type(error).__name__
            )
    return [_alone(context, request) for request in batch]


def _has_sqlstate(error: Exception) -> bool:
    """Whether PostgreSQL answered, with an error such as a lock timeout that one request may have caused."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) is not None


def _alone(context: Context, request: BatchedRequest) -> Result:
    try:
        return idempotent(context, request.call, request.operation)
    except Exception as error:
        return error


def _together(context: Context, batch: Sequence[BatchedRequest]) -> Sequence[Result]:
    """Run the operations in one transaction. One that raises a MooringError does not affect the others.

    Raises:
        Exception: of one of the operations, or of the commit. None of them has taken effect.
    """
    with context.database.write() as session:
        if instance_ids := [each.instance_id for each in batch if each.instance_id is not None]:
            locks.for_operations(session, instance_ids)
        results = _stored(context, session, batch)
        new = [request for request in batch if request not in results]
        answers: dict[BatchedRequest, StoredAnswer] = {}
        for request in sorted(new, key=attrgetter("project")):
            try:
                answers[request] = _perform(session, request)
            except MooringError as error:
                results[request] = error
        _store(context, session, answers)
        storage.enforce(session, context.storage_limits)
    results |= {request: respond(answer) for request, answer in answers.items()}
    return [results[request] for request in batch]


def _stored(
    context: Context, session: Session, batch: Sequence[BatchedRequest]
) -> dict[BatchedRequest, Result]:
    """Claim the keys. Returns the results of requests that are repeated, or whose key is taken."""
    results: dict[BatchedRequest, Result] = {}
    for request in sorted((each for each in batch if each.call.idempotency_key), key=attrgetter("key")):
        try:
            stored = claim(context, session, request.call)
        except MooringError as error:
            results[request] = error
        else:
            if stored is not None:
                results[request] = respond(stored, replayed=True)
    return results


def _perform(session: Session, request: BatchedRequest) -> StoredAnswer:
    recorded, inserted = audit_log.recorded(session), set(session.new)
    try:
        return perform(session, request.call.access, request.operation)
    except MooringError as error:
        if audit_log.recorded(session) != recorded or set(session.new) - inserted:
            raise AssertionError("an operation of a batch must raise before it writes") from error
        if request.key is not None:
            idempotency.abandon(session, *request.key)
        raise


def _store(context: Context, session: Session, answers: Mapping[BatchedRequest, StoredAnswer]) -> None:
    keyed = [request for request in answers if request.call.idempotency_key is not None]
    if keyed:
        callers = [request.call.access.caller for request in keyed]
        holders = {caller.id for caller in callers} | {caller.project_id for caller in callers}
        idempotency.lock_usage(session, holders)
    for request in sorted(keyed, key=attrgetter("key")):
        store(context, session, request.call, answers[request])
