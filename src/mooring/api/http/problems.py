"""Every error as `application/problem+json` (RFC 9457), whoever raised it."""

import logging
import re
import sqlite3
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic_core import to_json
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from mooring.core import errors
from mooring.core.errors import MooringError
from mooring.schemas.base import LONGEST_DETAIL, LONGEST_PATH, PROBLEM_MEDIA_TYPE

log = logging.getLogger(__name__)

# The nearest ancestor in this table decides; the tree is drawn in core/errors.py.
STATUS: Mapping[type[MooringError], int] = {
    errors.BadRequest: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.RequestTimeout: 408,
    errors.Conflict: 409,
    errors.Gone: 410,
    errors.PreconditionFailed: 412,
    errors.TooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.Invalid: 422,
    errors.TooManyRequests: 429,
    errors.HeadersTooLarge: 431,
    errors.Unavailable: 503,
    MooringError: 500,
}
RETRY_AFTER_S = 2  # where nobody can know when it will work again
# A body of a hundred thousand unknown fields would otherwise be answered with ten times its size.
_MOST_FIELD_ERRORS = 100
# Findings of a body that are told by their own code, if they are all that is wrong.
OWN_CODES = frozenset({"not_supported_yet", "reserved_env", "reserved_label", "spec_too_large"})
_BY_STATUS: Mapping[int, type[MooringError]] = {status: kind for kind, status in STATUS.items()}


def status_of(error: MooringError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def problem_response(request: Request, error: MooringError) -> Response:
    """The problem document of an error, with the headers that go with its status."""
    status = status_of(error)
    document = {
        "type": f"urn:mooring:error:{error.error_code}",
        "title": error.title,
        "status": status,
        "detail": _at_most(error.message, LONGEST_DETAIL),
        # Not `request.url`, which the Host header and control characters can bend.
        "instance": request.scope["path"][:LONGEST_PATH],
        "code": error.error_code,
        "request_id": getattr(request.state, "request_id", ""),
        "retryable": error.retryable,
        **error.fields,
    }
    return Response(to_json(document), status, headers_of(status, error), PROBLEM_MEDIA_TYPE)


def _at_most(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def headers_of(status: int, error: MooringError) -> dict[str, str]:
    """What goes with an error of this status."""
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)}
    return {}


def install(app: FastAPI) -> None:
    """Make every way for a request to fail end in `problem_response`."""
    app.add_exception_handler(MooringError, _on_mooring_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(IntegrityError, _on_integrity_error)
    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, _on_database_away)
    app.add_exception_handler(DataError, _on_data_error)


async def _on_mooring_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MooringError)
    return problem_response(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(request, invalid(error.errors()))


def invalid(found: Sequence[Any]) -> errors.Invalid:
    """The 422 for pydantic's findings; where all are of one kind with a code of its own, that is the code."""
    listed = [_field_error(item) for item in found[:_MOST_FIELD_ERRORS]]
    own = {item["code"] for item in listed}
    code = own.pop() if len(own) == 1 and own <= OWN_CODES else None
    where = "; ".join(f"{item['pointer'] or 'the body'}: {item['message']}" for item in listed[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return errors.Invalid(where + more, code=code, errors=listed)


def _field_error(item: Mapping[str, Any]) -> dict[str, str]:
    source, *path = item["loc"]
    if source == "body":
        pointer = "".join(f"/{_escaped(str(part))}" for part in path if not _is_branch(part))
    else:
        pointer = str(path[0] if path else "")
    return {"pointer": pointer, "code": _code(item), "message": _at_most(_message(item), LONGEST_DETAIL)}


# How pydantic names the branches of a union, which are no part of the body.
_BRANCH = re.compile(r"constrained-[a-z]+|(list|dict|nullable|function-[a-z]+)\[.+\]|SecretReference")


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and _BRANCH.fullmatch(part) is not None


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "there is no such field; see /docs for what there is"
    return str(item["msg"]).removeprefix("Value error, ")


def _escaped(part: str) -> str:
    # A key of the body may hold anything, NUL and half a surrogate pair included.
    shown = "".join(character if character.isprintable() else "\ufffd" for character in part[:200])
    return shown.replace("~", "~0").replace("/", "~1")


def _code(item: Mapping[str, Any]) -> str:
    kind = str(item["type"])
    return {"extra_forbidden": "unknown_field", "missing": "required"}.get(kind, kind)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, MooringError):
        return problem_response(request, error.__cause__)  # FastAPI wraps what reading a body raises
    kind = _BY_STATUS.get(error.status_code, errors.BadRequest)
    if error.status_code == HTTPStatus.NOT_FOUND:
        made: MooringError = kind(f"there is nothing at {request.scope['path']}; see /docs for what there is")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        made = kind(f"{request.method} is not possible at {request.scope['path']}")
    else:
        made = kind(str(error.detail))
    response = problem_response(request, made)
    response.headers.update(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: Request) -> list[str]:
    """What is possible at the request's path; Starlette names the methods of one route only."""
    routes = iter_route_contexts(request.app.routes)
    there = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in there for method in route.methods or ()})


async def _on_integrity_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, IntegrityError)
    # Two requests passed the friendly check at once; the unique index let one of them through.
    refused_by = str(error.orig)
    if "uq_instances_project_id_name" in refused_by or "instances.project_id, instances.name" in refused_by:
        return problem_response(request, errors.NameTaken("another request took this name just now"))
    if "uq_projects_name" in refused_by or "projects.name" in refused_by:
        return problem_response(request, errors.NameTaken("another request took this name just now"))
    if "uq_users_email" in refused_by or "users.email" in refused_by:
        message = "another user was given this e-mail just now"
        return problem_response(request, errors.Conflict(message, code="email_taken"))
    if "uq_nodes_name" in refused_by or "nodes.name" in refused_by:
        message = "another machine joined under this name just now"
        return problem_response(request, errors.Conflict(message, code="node_name_taken"))
    log.warning("refused by a constraint: %s", error.orig)
    message = "another request changed the same thing just now; try again"
    return problem_response(request, errors.Conflict(message))


async def _on_database_away(request: Request, error: Exception) -> Response:
    if getattr(getattr(error, "orig", None), "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        return on_bug(
            request, error
        )  # a bad statement, which SQLite tells no better; trying again is no help
    log.warning("the database does not answer: %s", error)
    message = "the database does not answer just now; nothing was changed that was not acknowledged"
    return problem_response(request, errors.Unavailable(message, code="database_unavailable"))


async def _on_data_error(request: Request, error: Exception) -> Response:
    log.warning("refused by the database: %s", error)
    return problem_response(request, errors.Invalid("a value is out of the range that can be stored"))


def on_bug(request: Request, error: Exception) -> Response:
    """The 500 for what nobody expected; the log has the cause."""
    request_id = getattr(request.state, "request_id", "")
    log.error("unhandled error in request %s", request_id, exc_info=error)
    message = "this is a bug in Mooring; its log has the cause under the request_id"
    return problem_response(request, MooringError(message))
