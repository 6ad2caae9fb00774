"""Answers as they go out, and the three headers that change how a request is answered."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic_core import to_json
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth import CurrentCaller
from mooring.control import idempotency
from mooring.control.api_keys import Caller
from mooring.control.idempotency import Answer
from mooring.db.session import Database
from mooring.schemas.base import Json


@dataclass(frozen=True, slots=True)
class Call:
    """A POST that may carry an Idempotency-Key."""

    caller: Caller
    idempotency_key: str | None
    fingerprint: str


async def _call(
    request: Request,
    caller: CurrentCaller,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            pattern=r"^[\x21-\x7e]+$",
            description="repeat the request with the same key to get the first answer again (24 h)",
        ),
    ] = None,
) -> Call:
    if idempotency_key is None:
        return Call(caller, None, "")
    head = f"{request.method} {request.scope['path']}?".encode() + request.scope["query_string"] + b"\n"
    return Call(caller, idempotency_key, hashlib.sha256(head + await request.body()).hexdigest())


CurrentCall = Annotated[Call, Depends(_call)]


def once(database: Database, call: Call, act: Callable[[Session], Answer]) -> Response:
    """Do it in one transaction with its stored answer, or replay the answer it had."""
    with database.write() as session:
        key, caller = call.idempotency_key, call.caller.key_id
        if key is None:
            answer = act(session)
        else:
            stored = idempotency.claim(session, caller, key, call.fingerprint)
            if stored is not None:
                return respond(stored, replayed=True)
            answer = act(session)
            idempotency.store(session, caller, key, answer)
    # Only here has it been committed; an answer sent earlier could acknowledge what is then lost.
    return respond(answer)


def answer(content: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, to_json(content), dict(headers or {}))


def respond(made: Answer, *, replayed: bool = False) -> Response:
    headers = made.headers | ({"Idempotency-Replayed": "true"} if replayed else {})
    return Response(made.body or None, made.status, headers, "application/json" if made.body else None)


def etag(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"'}


def _if_match(
    if_match: Annotated[
        str | None, Header(description='the ETag you read, such as `"5"`; 412 when it is stale')
    ] = None,
) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    value = if_match.strip().removeprefix("W/").strip('"')
    # What was never an ETag of ours matches no version.
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1


IfMatch = Annotated[int | None, Depends(_if_match)]
