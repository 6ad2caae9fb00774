"""Answers as they go out, and the three headers that change how a request is answered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic_core import to_json
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.control import idempotency
from mooring.control.audit import audit_log
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import storage
from mooring.core.access import Access
from mooring.schemas.base import Json


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
            description="repeat the request with the same key to get the first answer again (24 h). An "
            "answer over 64 KiB is not kept: 409 `replay_too_large`",
        ),
    ] = None,
) -> Call:
    if idempotency_key is None:
        return Call(access, None, "")
    head = f"{request.method} {request.scope['path']}?".encode() + request.scope["query_string"] + b"\n"
    return Call(access, idempotency_key, context.encryptor.fingerprint(head + await request.body()))


CurrentCall = Annotated[Call, Depends(_call)]


Act = Callable[[Session], StoredAnswer]


def once(context: Context, call: Call, act: Act) -> Response:
    """Do it in one transaction with its stored answer and its row of the audit log, or replay its answer."""
    if call.idempotency_key is None:
        return done(context, call.access, act)
    with context.database.write() as session:
        stored = claim(context, session, call)
        if stored is not None:
            return respond(stored, replayed=True)
        answer = _audited(session, call.access, act)
        store(context, session, call, answer)
    # Only here has it been committed; an answer sent earlier could acknowledge what is then lost.
    return respond(answer)


def done(context: Context, access: Access, act: Act) -> Response:
    """Do it in one transaction with its row of the audit log; for what may be repeated as it is."""
    with context.database.write() as session:
        answer = _audited(session, access, act)
        storage.enforce(session, context.storage_limits)
    return respond(answer)


def claim(context: Context, session: Session, call: Call) -> StoredAnswer | None:
    """Take the key of a call that has one; as `idempotency.claim`."""
    kept, key = context.settings.idempotency_kept, call.idempotency_key or ""
    return idempotency.claim(session, context.encryptor, call.access.caller.id, key, call.fingerprint, kept)


def store(context: Context, session: Session, call: Call, answer: StoredAnswer) -> None:
    """Keep the answer of a call that has a key, and settle what the call has written.

    Raises, at the end of the transaction:
        QuotaExceeded, DailyWriteLimit: as `storage.enforce`.
    """
    caller, key = call.access.caller, call.idempotency_key or ""
    idempotency.store(session, context.encryptor, caller.id, key, answer, caller.project_id)
    storage.enforce(session, context.storage_limits)


def _audited(session: Session, access: Access, act: Act) -> StoredAnswer:
    answer = act(session)
    if audit_log.recorded(session) != 1:
        raise AssertionError(f"{access.action} must write exactly one row of the audit log")
    return answer


def answer(
    content: Json, status: int = 200, headers: Mapping[str, str] | None = None, *, sealed: bool = False
) -> StoredAnswer:
    """An answer of JSON. `sealed`: it shows a secret, so what is kept for a replay is encrypted."""
    return StoredAnswer(status, to_json(content), dict(headers or {}), sealed)


NO_CONTENT = StoredAnswer(204, b"", {})


def respond(made: StoredAnswer, *, replayed: bool = False) -> Response:
    headers = made.headers | ({"Idempotency-Replayed": "true"} if replayed else {})
    return Response(made.body or None, made.status, headers, "application/json" if made.body else None)


def etag(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"'}


def _if_match(
    if_match: Annotated[
        str | None,
        Header(max_length=64, description='the ETag you read, such as `"5"`; 412 when it is stale'),
    ] = None,
) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    value = if_match.strip().removeprefix("W/").strip('"')
    # What was never an ETag of ours matches no version.
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1


IfMatch = Annotated[int | None, Depends(_if_match)]
