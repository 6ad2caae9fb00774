"""The errors and headers that all operations of the OpenAPI document share."""

from collections.abc import Iterator
from typing import Any

from mooring.api.openapi.responses import ANY_REQUEST, WITH_CREDENTIALS, problem
from mooring.schemas.base import Json

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")

_SECONDS: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
HEADERS: Json = {
    "X-Request-Id": {
        "description": "the request's own id, or a generated one; the server's log has it too",
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
    "Idempotency-Replayed": {
        "description": "`true` if this repeats the answer to the first request with this key",
        "schema": {"type": "string", "enum": ["true"]},
    },
}


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Yield each operation with its path and its method."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, method, item[method]


def complete(document: Json) -> None:
    """Add to each operation the errors of the layers around it, and the headers."""
    components = document["components"]
    components["headers"] = HEADERS
    components["responses"] = {}
    for _path, method, operation in operations(document):
        operation.setdefault("security", [])
        public = method == "get" and not operation["security"]
        answers: Json = operation["responses"]
        for status in (*ANY_REQUEST, *(() if public else WITH_CREDENTIALS)):
            answers.setdefault(str(status), problem(status))
        if public:
            for status in WITH_CREDENTIALS:
                answers.pop(str(status), None)
        for status, answer in sorted(answers.items()):
            shared = status >= "400" and answer == problem(int(status))
            answer["headers"] = {**_headers(status, method, answer), **answer.get("headers", {})}
            if shared:
                components["responses"][f"Problem{status}"] = answer
                answers[status] = {"$ref": f"#/components/responses/Problem{status}"}
        operation["responses"] = dict(sorted(answers.items()))


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
