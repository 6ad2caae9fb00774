"""The error answers that an operation declares in the OpenAPI document."""

from typing import Any

from mooring.api.http.problems import STATUS
from mooring.schemas.base import PROBLEM_MEDIA_TYPE

_DESCRIPTIONS = {
    400: "The request is malformed, or its cursor is invalid.",
    401: "The credentials are missing or invalid.",
    403: "The credentials do not permit this operation.",
    404: "The resource does not exist, or you may not see it.",
    408: "The request did not arrive in time.",
    409: "The request conflicts with the state of the resource.",
    410: "The requested events or stream no longer exist.",
    412: "The resource has changed since you read it.",
    413: "The body is larger than 1 MiB, or has more than 4000 values.",
    415: "The body is not JSON.",
    422: "A field is invalid, missing or unknown.",
    429: "Too many requests. Retry after the time in `Retry-After`.",
    431: "The path, query and headers are too large or too many.",
    500: "An error in Mooring. Its log has the cause under the `request_id`.",
    503: "The database or node is unavailable. Retry after the time in `Retry-After`.",
}
# Errors of the layers around every operation.
ANY_REQUEST = (400, 408, 413, 431, 500)
WITH_CREDENTIALS = (401, 403, 429)
_ALWAYS = (*WITH_CREDENTIALS, 422, 503)
_WITH_BODY = (415,)

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, body: bool = False) -> Responses:
    """Return the common errors and these. `body` adds the errors of requests with a JSON body."""
    listed = sorted({*ANY_REQUEST, *_ALWAYS, *statuses, *(_WITH_BODY if body else ())})
    return {status: problem(status) for status in listed}


def problem(status: int) -> dict[str, Any]:
    """Return one error answer of the document."""
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": _example(status)}
    return {"description": _DESCRIPTIONS[status], "content": {PROBLEM_MEDIA_TYPE: content}}


def _example(status: int) -> dict[str, Any]:
    """Return an example. Without one, Swagger UI generates noise that matches the patterns."""
    kind = next(kind for kind, known in STATUS.items() if known == status)
    return {
        "type": f"urn:mooring:error:{kind.code}",
        "title": kind.title,
        "status": status,
        "detail": _DESCRIPTIONS[status],
        "instance": "/v1/instances",
        "code": kind.code,
        "request_id": "req_01m7ytn7kexrn34wn367q44k9v",
        "retryable": kind.retryable,
    }
