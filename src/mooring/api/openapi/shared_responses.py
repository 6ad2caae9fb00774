"""Completes the operations of the OpenAPI document with headers and with the errors that they share."""

from collections.abc import Iterator, Mapping
from typing import Any

from mooring.api.auth.rules import RULES
from mooring.api.openapi import responses
from mooring.api.openapi.responses import ErrorClasses
from mooring.auth.rate_limits import ActionClass
from mooring_client import errors
from mooring_client.errors import MooringError
from mooring_client.schemas.base import Json

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")

_SECONDS: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
HEADERS: Json = {
    "X-Request-Id": {
        "description": "the `X-Request-Id` of the request, or a generated id; logged with unexpected errors",
        "required": True,
        "schema": {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._:-]+$"},
    },
    "RateLimit": {
        "description": "remaining requests of each rate limit; absent if no limit applies",
        "schema": {"type": "string", "maxLength": 1024},
    },
    "RateLimit-Policy": {
        "description": "the rate limits; absent if no limit applies",
        "schema": {"type": "string", "maxLength": 1024},
    },
    "Retry-After": {
        "description": "seconds to wait before repeating the request",
        "required": True,
        "schema": _SECONDS,
    },
    "WWW-Authenticate": {
        "description": "the accepted authentication scheme",
        "required": True,
        "schema": {"type": "string", "maxLength": 1024},
    },
    "ETag": {
        "description": "the quoted `version`, for `If-Match`",
        "schema": {"type": "string", "maxLength": 64},
    },
    "Location": {
        "description": "path of the created resource",
        "schema": {"type": "string", "format": "uri-reference", "maxLength": 1024},
    },
    "Mooring-Applied": {
        "description": "what a PUT of all fields has done",
        "schema": {"type": "string", "enum": ["created", "changed", "unchanged"]},
    },
    "Idempotency-Replayed": {
        "description": "`true` if this repeats the response to the first request with this key",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
_MAX_SPECIAL = 3  # a response with more codes, besides those of ALWAYS, is declared at its operation
_IDEMPOTENCY = (errors.IdempotencyInProgress, errors.IdempotencyKeyReused, errors.ReplayTooLarge)
_BY_PARAMETER: Mapping[str, ErrorClasses] = {
    "cursor": [errors.BadCursor],
    "idempotency-key": [errors.BadJson, *_IDEMPOTENCY],
    "if-match": [errors.PreconditionFailed],
    "last-event-id": [errors.BadEventId],
}
_WRITING: ErrorClasses = (errors.Conflict, errors.DailyWriteLimit, errors.QuotaExceeded)
_BY_ACTION_CLASS: Mapping[ActionClass, ErrorClasses] = {
    ActionClass.READ: [],
    ActionClass.WRITE: _WRITING,
    ActionClass.EXEC: [*_WRITING, errors.TooManyStreams],
    ActionClass.STREAM: [errors.TooManyStreams],
}


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Yield each operation with its path and its method."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, method, item[method]


def complete(document: Json) -> None:
    """Add headers and errors to each operation; error responses that operations share become components."""
    components = document["components"]
    components["headers"], components["responses"], components["examples"] = HEADERS, {}, {}
    for _path, method, operation in operations(document):
        operation.setdefault("security", [])
        answers: Json = {code: answer for code, answer in operation["responses"].items() if code < "400"}
        for status, answer in answers.items():
            answer["headers"] = {**_headers(status, method, answer), **answer.get("headers", {})}
        for same_status in responses.by_status(_errors_of(method, operation)).values():
            components["examples"] |= {each.code: responses.example(each) for each in same_status}
            status, answer = str(same_status[0].status), responses.problem(same_status)
            answer["headers"] = _headers(status, method, answer)
            special = [each for each in same_status if each not in responses.ALWAYS]
            if len(special) <= _MAX_SPECIAL:
                name = "".join([f"Problem{status}", *(each.__name__ for each in special)])
                components["responses"][name] = answer
                answer = {"$ref": f"#/components/responses/{name}"}
            answers[status] = answer
        operation["responses"] = dict(sorted(answers.items()))


def _errors_of(method: str, operation: Json) -> set[type[MooringError]]:
    found: set[type[MooringError]] = {*responses.ANY_REQUEST, *responses.declared(operation)}
    found.update(_implied(operation))
    # Joining a node, a POST, has no security scheme, but its body contains a credential.
    is_public = method == "get" and not operation["security"]
    with_credentials = responses.WITH_CREDENTIALS
    return found.difference(with_credentials) if is_public else found.union(with_credentials)


def _implied(operation: Json) -> Iterator[type[MooringError]]:
    """Yield the errors that follow from the operation's parameters, body and action class."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            yield errors.NotFound
        yield from _BY_PARAMETER.get(parameter["name"], ())
    if "requestBody" in operation:
        yield from (errors.BadJson, errors.UnsupportedMediaType)
    yield from _BY_ACTION_CLASS[RULES[operation["operationId"]].action_class]


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
