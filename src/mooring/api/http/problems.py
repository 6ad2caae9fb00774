"""Turns every error into an `application/problem+json` document (RFC 9457)."""

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic_core import to_json
from sqlalchemy.exc import DataError, IntegrityError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from mooring.core import ids
from mooring.db import failures
from mooring.db.types import new_id
from mooring_client import errors
from mooring_client.errors import MooringError
from mooring_client.schemas import pointers
from mooring_client.schemas.base import LONGEST_DETAIL, LONGEST_PATH, PROBLEM_MEDIA_TYPE, Json

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2  # if the error does not say when to retry
# Without a limit, a body of 100,000 unknown fields would get an answer of ten times its size.
_MAX_FIELD_ERRORS = 100
# Field errors whose code becomes that of the whole answer if the request has no other errors.
_OWN_CODES: Mapping[str, type[errors.Invalid]] = {
    kind.code: kind
    for kind in (errors.NotSupportedYet, errors.ReservedEnv, errors.ReservedLabel, errors.SpecTooLarge)
}
_BY_STATUS: Mapping[int, type[MooringError]] = {
    MooringError.status: MooringError,
    **{kind.status: kind for kind in MooringError.__subclasses__()},
}


def problem_response(request: Request, error: MooringError) -> Response:
    """The problem document of an error, with the headers that go with its status."""
    # Not `request.url`: the Host header and control characters can change it.
    path, request_id = request.scope["path"][:LONGEST_PATH], getattr(request.state, "request_id", "")
    document = problem_document(error, path, request_id)
    return Response(to_json(document), error.status, headers_of(error), PROBLEM_MEDIA_TYPE)


def raw_answer(error: MooringError) -> bytes:
    """The whole HTTP answer to a request that never reaches the app, before the connection is closed."""
    request_id = new_id(ids.REQUEST)
    body = to_json(problem_document(error, None, request_id))
    headers = {
        "Content-Type": PROBLEM_MEDIA_TYPE,
        "Content-Length": str(len(body)),
        "X-Request-Id": request_id,
        "Connection": "close",
        **headers_of(error),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {error.title}\r\n{lines}\r\n".encode() + body


def problem_document(error: MooringError, path: str | None, request_id: str) -> Json:
    return {
        "type": f"urn:mooring:error:{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": _at_most(error.message, LONGEST_DETAIL),
        "instance": path,
        "code": error.code,
        "request_id": request_id,
        "retryable": error.retryable,
        **error.fields,
    }


def _at_most(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def headers_of(error: MooringError) -> dict[str, str]:
    """The headers that go with the error's status."""
    if error.status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if error.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)}
    return {}


def install(app: FastAPI) -> None:
    """Register handlers that answer every exception with `problem_response`."""
    app.add_exception_handler(MooringError, _on_mooring_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(IntegrityError, _on_integrity_error)
    for kind in failures.DATABASE_ERRORS:
        app.add_exception_handler(kind, _on_database_error)
    app.add_exception_handler(DataError, _on_data_error)


async def _on_mooring_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MooringError)
    return problem_response(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(request, invalid(error.errors()))


def invalid(found: Sequence[Any]) -> errors.Invalid:
    """The 422 for pydantic's errors. If all have one code of _OWN_CODES, the answer has that code."""
    listed = [_field_error(item) for item in found[:_MAX_FIELD_ERRORS]]
    codes = {item["code"] for item in listed}
    kind = _OWN_CODES.get(codes.pop(), errors.Invalid) if len(codes) == 1 else errors.Invalid
    where = "; ".join(f"{item['pointer'] or 'the body'}: {item['message']}" for item in listed[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return kind(where + more, errors=listed)


def _field_error(item: Mapping[str, Any]) -> dict[str, str]:
    source, *path = item["loc"]
    if source == "body":
        pointer = "".join(f"/{_escaped(str(part))}" for part in path if not _is_branch(part))
    else:
        pointer = str(path[0] if path else "")
    return {"pointer": pointer, "code": _code(item), "message": _at_most(_message(item), LONGEST_DETAIL)}


# Pydantic's names for the branches of a union, which are not part of the path in the body.
_BRANCH = re.compile(r"constrained-[a-z]+|(list|dict|nullable|function-[a-z]+)\[.+\]|SecretReference")


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and _BRANCH.fullmatch(part) is not None


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown field; see /docs for the fields"
    return str(item["msg"]).removeprefix("Value error, ")


def _escaped(part: str) -> str:
    # A key may contain any character, including NUL and lone surrogates.
    shown = "".join(character if character.isprintable() else "\ufffd" for character in part[:200])
    return pointers.escaped(shown)


def _code(item: Mapping[str, Any]) -> str:
    kind = str(item["type"])
    return {"extra_forbidden": "unknown_field", "missing": "required"}.get(kind, kind)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, MooringError):
        return problem_response(request, error.__cause__)  # FastAPI wraps errors raised while it reads a body
    kind = _BY_STATUS.get(error.status_code, errors.BadRequest)
    if error.status_code == HTTPStatus.NOT_FOUND:
        problem: MooringError = kind(f"no such path: {request.scope['path']}. The API reference is at /docs")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = kind(f"{request.method} is not allowed at {request.scope['path']}")
    else:
        problem = kind(str(error.detail))
    response = problem_response(request, problem)
    response.headers.update(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: Request) -> list[str]:
    """All methods of the request's path; Starlette names those of one route only."""
    routes = iter_route_contexts(request.app.routes)
    at_path = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in at_path for method in route.methods or ()})


async def _on_integrity_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, IntegrityError)
    # Two concurrent requests passed the check before the insert; the unique index rejected the second.
    constraint = str(error.orig)
    if "uq_instances_project_id_name" in constraint or "instances.project_id, instances.name" in constraint:
        return problem_response(request, errors.NameTaken("another request just took this name"))
    if "uq_projects_name" in constraint or "projects.name" in constraint:
        return problem_response(request, errors.NameTaken("another request just took this name"))
    if "uq_users_email" in constraint or "users.email" in constraint:
        return problem_response(request, errors.EmailTaken("another request just gave this e-mail to a user"))
    if "uq_nodes_name" in constraint or "nodes.name" in constraint:
        return problem_response(request, errors.NodeNameTaken("another machine just joined under this name"))
    log.warning("constraint violated: %s", error.orig)
    message = "another request changed the same resource at the same time; try again"
    return problem_response(request, errors.Conflict(message))


async def _on_database_error(request: Request, error: Exception) -> Response:
    if not failures.is_unavailable(error):
        return on_bug(request, error)
    return problem_response(request, database_unavailable(error))


def database_unavailable(error: Exception) -> errors.DatabaseUnavailable:
    """Log the failure of a database, and return the error to answer with."""
    if failures.is_damage(getattr(error, "orig", None)):
        return errors.DatabaseUnavailable("the database is damaged; an admin must restore a backup")
    log.warning("database unavailable: %s", error)
    # A commit whose answer was lost may have taken effect.
    return errors.DatabaseUnavailable(
        "cannot reach the database; a change may or may not have been made: repeat the request (a POST with "
        "the same Idempotency-Key)"
    )


async def _on_data_error(request: Request, error: Exception) -> Response:
    log.warning("value rejected by the database: %s", error)
    return problem_response(request, errors.Invalid("a value is out of the range that can be stored"))


def on_bug(request: Request, error: Exception) -> Response:
    """The 500 for an unexpected exception, which is logged."""
    request_id = getattr(request.state, "request_id", "")
    log.error("unhandled error in request %s", request_id, exc_info=error)
    message = "this is a bug in Mooring; search its log for the request_id"
    return problem_response(request, MooringError(message))
