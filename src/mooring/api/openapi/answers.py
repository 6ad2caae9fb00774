"""What every operation's answers have in common in the OpenAPI document: errors, headers, credentials."""

from collections.abc import Iterator, Mapping
from typing import Any

from mooring.api.auth.rules import RULES, ActionClass
from mooring.api.openapi.responses import (
    ANY_REQUEST,
    WITH_CREDENTIALS,
    Kinds,
    by_status,
    declared,
    example,
    problem,
)
from mooring.core import errors
from mooring.core.errors import MooringError
from mooring.schemas.base import Json

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")

_SECONDS: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
HEADERS: Json = {
    "X-Request-Id": {
        "description": "the request's own id, or one that was made for it; the log has it too",
        "required": True,
        "schema": {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._:-]+$"},
    },
    "RateLimit": {
        "description": "what is left of each limit that applies; absent where none does",
        "schema": {"type": "string", "maxLength": 1024},
    },
    "RateLimit-Policy": {
        "description": "the limits that apply; absent where none does",
        "schema": {"type": "string", "maxLength": 1024},
    },
    "Retry-After": {
        "description": "seconds to wait before the request is worth repeating",
        "required": True,
        "schema": _SECONDS,
    },
    "WWW-Authenticate": {
        "description": "the kind of credentials that are taken",
        "required": True,
        "schema": {"type": "string", "maxLength": 1024},
    },
    "ETag": {
        "description": "the quoted `version`, for If-Match",
        "schema": {"type": "string", "maxLength": 64},
    },
    "Location": {
        "description": "where what was made is found",
        "schema": {"type": "string", "format": "uri-reference", "maxLength": 1024},
    },
    "Idempotency-Replayed": {
        "description": "`true` where this is the first answer again",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
_LOGIN_ERRORS = frozenset(WITH_CREDENTIALS)
# What follows from a parameter, a body, and a class of action.
_BY_PARAMETER: Mapping[str, Kinds] = {
    "cursor": [errors.BadCursor],
    "idempotency-key": [
        *(errors.BadJson, errors.IdempotencyInProgress),
        *(errors.IdempotencyKeyReused, errors.ReplayTooLarge),
    ],
    "if-match": [errors.PreconditionFailed],
    "last-event-id": [errors.BadEventId],
}
_BY_BODY: Kinds = (errors.BadJson, errors.UnsupportedMediaType)
_WRITING: Kinds = (errors.Conflict, errors.DailyWriteLimit, errors.QuotaExceeded)
_BY_CLASS: Mapping[ActionClass, Kinds] = {
    ActionClass.READ: [],
    ActionClass.WRITE: _WRITING,
    ActionClass.EXEC: [*_WRITING, errors.TooManyStreams],
    ActionClass.STREAM: [errors.TooManyStreams],
}


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Each operation with its path and its method."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, method, item[method]


def complete(document: Json) -> None:
    """State in each operation what the layers around it may answer, and the headers that come with it."""
    components = document["components"]
    components["headers"], components["responses"], used = HEADERS, {}, set(ANY_REQUEST)
    for _path, method, operation in operations(document):
        operation.setdefault("security", [])
        public = method == "get" and not operation["security"]
        answers: Json = operation["responses"]
        kinds = {*ANY_REQUEST, *declared(answers), *_implied(operation)}
        kinds = kinds - _LOGIN_ERRORS if public else kinds | _LOGIN_ERRORS
        used |= kinds
        for status in [status for status in answers if status >= "400"]:
            del answers[status]
        for status, answer in answers.items():
            answer["headers"] = {**_headers(status, method, answer), **answer.get("headers", {})}
        for of_status in by_status(kinds).values():
            status, answer = str(of_status[0].status), problem(of_status)
            answer["headers"] = _headers(status, method, answer)
            name = f"Problem{status}{_suffix(of_status)}"
            shared = components["responses"].setdefault(name, answer) == answer
            answers[status] = {"$ref": f"#/components/responses/{name}"} if shared else answer
        operation["responses"] = dict(sorted(answers.items()))
    components["examples"] = {kind.code: example(kind) for kind in used}


def _implied(operation: Json) -> Iterator[type[MooringError]]:
    for parameter in operation.get("parameters", ()):
        yield from _BY_PARAMETER.get(parameter["name"], ())
    if "requestBody" in operation:
        yield from _BY_BODY
    yield from _BY_CLASS[RULES[operation["operationId"]].action_class]


def _suffix(kinds: Kinds) -> str:
    """Tells the answers of one status apart by the classes below its branch that any operation lacks."""
    return "".join(kind.__name__ for kind in kinds if kind.__base__ is not MooringError)


def _headers(status: str, method: str, answer: Json) -> Json:
    names = ["X-Request-Id", "RateLimit", "RateLimit-Policy"]
    if status in {"429", "503"}:
        names.append("Retry-After")
    if status == "401":
        names.append("WWW-Authenticate")
    if status < "300":
        names += _headers_of_success(status, method, answer)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _headers_of_success(status: str, method: str, answer: Json) -> list[str]:
    names = ["Idempotency-Replayed"] if method == "post" else []
    if status == "201":
        names.append("Location")
    content: dict[str, Any] = answer.get("content", {})
    if "application/json" in content:
        names.append("ETag")
    return names
