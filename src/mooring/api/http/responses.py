"""Answers as HTTP responses, and the headers for optimistic concurrency (ETag, If-Match)."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Header
from pydantic_core import to_json
from starlette.responses import Response

from mooring.control.concurrency import ANY_VERSION
from mooring.control.idempotency import StoredAnswer
from mooring_client.schemas.base import Json


def json_answer(
    content: Json, status: int = 200, headers: Mapping[str, str] | None = None, *, encrypted: bool = False
) -> StoredAnswer:
    """A JSON answer. `encrypted`: it shows a secret, so the copy stored for replays is encrypted."""
    return StoredAnswer(status, to_json(content), dict(headers or {}), encrypted)


NO_CONTENT = StoredAnswer(204, b"", {})


def respond(answer: StoredAnswer, *, replayed: bool = False) -> Response:
    headers = answer.headers | ({"Idempotency-Replayed": "true"} if replayed else {})
    media_type = "application/json" if answer.body else None
    return Response(answer.body or None, answer.status, headers, media_type)


def etag(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"'}


async def _if_match(  # async: FastAPI runs other dependencies in a thread
    if_match: Annotated[
        str | None,
        Header(max_length=64, description='the ETag that you read, such as `"5"`; 412 if it is out of date'),
    ] = None,
) -> int | None:
    if if_match is None:
        return None
    if if_match.strip() == "*":
        return ANY_VERSION
    value = if_match.strip().removeprefix("W/").strip('"')
    # A string that we never issued as an ETag matches no version.
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1


IfMatch = Annotated[int | None, Depends(_if_match)]
