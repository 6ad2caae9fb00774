"""The error answers that an operation declares in the OpenAPI document."""

from typing import Any

from mooring.api.http.problems import STATUS
from mooring.schemas.base import PROBLEM_MEDIA_TYPE

_WHAT = {
    400: "The request cannot be read, or a cursor is bad.",
    401: "No credentials, or bad ones.",
    403: "The key may not do this.",
    404: "It does not exist, or belongs to somebody else.",
    408: "The request came too slowly and was cut off.",
    409: "The present state forbids it.",
    410: "What was asked for is no longer kept.",
    412: "It changed since you read it.",
    413: "The body is larger than 1 MiB, or holds more than 4000 values.",
    415: "The body is not JSON.",
    422: "The request is well-formed and asks for something impossible.",
    429: "Too many requests; see Retry-After.",
    431: "Path, query and headers are larger than 64 KiB, or more than can be meant.",
    500: "A bug in Mooring; its log has the cause under the request_id.",
    503: "The database or the node does not answer just now; see Retry-After.",
}
# What the layers around every operation may answer, before it is looked at.
ANY_REQUEST = (400, 408, 413, 431, 500)
WITH_CREDENTIALS = (401, 403, 429)
_ALWAYS = (*WITH_CREDENTIALS, 422, 503)
_WITH_BODY = (415,)

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, body: bool = False) -> Responses:
    """The usual errors and these; `body` adds those of a request with a JSON body."""
    listed = sorted({*ANY_REQUEST, *_ALWAYS, *statuses, *(_WITH_BODY if body else ())})
    return {status: problem(status) for status in listed}


def problem(status: int) -> dict[str, Any]:
    """One error answer, as the document has it."""
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": _example(status)}
    return {"description": _WHAT[status], "content": {PROBLEM_MEDIA_TYPE: content}}


def _example(status: int) -> dict[str, Any]:
    """Without it Swagger UI makes up noise that fits the patterns."""
    kind = next(kind for kind, known in STATUS.items() if known == status)
    return {
        "type": f"urn:mooring:error:{kind.code}",
        "title": kind.title,
        "status": status,
        "detail": _WHAT[status],
        "instance": "/v1/instances",
        "code": kind.code,
        "request_id": "req_01m7ytn7kexrn34wn367q44k9v",
        "retryable": kind.retryable,
    }
