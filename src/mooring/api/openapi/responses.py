"""The error answers that an operation declares in the OpenAPI document."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from mooring.core import errors as tree
from mooring.core.errors import MooringError
from mooring.schemas.base import PROBLEM_MEDIA_TYPE, Json

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
Kinds = Iterable[type[MooringError]]
# What the layers around every operation may answer, before it is looked at; then what any operation may.
ANY_REQUEST: Final[Kinds] = (
    *(tree.BadRequest, tree.MalformedRequest, tree.RequestTimeout),
    *(tree.TooLarge, tree.HeadersTooLarge, MooringError),
)
WITH_CREDENTIALS: Final[Kinds] = (tree.Unauthorized, tree.Forbidden, tree.TooManyRequests)
_REST = (tree.Invalid, tree.Unavailable, tree.DatabaseUnavailable, tree.SsoUnavailable)
ALWAYS: Final = frozenset({*ANY_REQUEST, *WITH_CREDENTIALS, *_REST})
# A body with the spec of an instance, and a spec that is checked against the rules of its project.
SPEC: Final = (tree.NotSupportedYet, tree.ReservedEnv, tree.ReservedLabel, tree.SpecTooLarge)
ADMISSION: Final = (
    *(tree.GpuSharingNotAllowed, tree.ImageNotAllowed, tree.NodeSelectorConflict, tree.PriorityNotAllowed),
    *(tree.RegistryNotAllowed, tree.SecretsTooLarge, tree.TooManyPorts, tree.UnknownSecret),
)

Responses = dict[int | str, dict[str, Any]]


def errors(*kinds: type[MooringError]) -> Responses:
    """The error answers of an operation that raises these, and what any operation raises.

    `answers.complete` adds what follows from its parameters and its class of action.
    """
    return {status: problem(of_status) for status, of_status in by_status((*ALWAYS, *kinds)).items()}


def by_status(kinds: Kinds) -> dict[int, list[type[MooringError]]]:
    found: dict[int, list[type[MooringError]]] = {}
    for kind in sorted(set(kinds), key=lambda kind: (kind.status, kind.code)):
        found.setdefault(kind.status, []).append(kind)
    return found


def problem(kinds: list[type[MooringError]]) -> dict[str, Any]:
    """The answer of one status: the codes in its description, and an example of each."""
    codes = ", ".join(f"`{kind.code}`" for kind in kinds)
    examples = {kind.code: {"$ref": f"#/components/examples/{kind.code}"} for kind in kinds}
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}
    description = f"{_WHAT[kinds[0].status]} Codes: {codes}."
    return {"description": description, "content": {PROBLEM_MEDIA_TYPE: content}}


def declared(operation: Json) -> Iterator[type[MooringError]]:
    """The classes that an operation has declared with `errors`."""
    for answer in operation["responses"].values():
        for code in answer.get("content", {}).get(PROBLEM_MEDIA_TYPE, {}).get("examples", ()):
            yield MooringError.by_code.get(code, MooringError)


def example(kind: type[MooringError]) -> dict[str, Any]:
    """Without it Swagger UI makes up noise that fits the patterns."""
    value = {
        "type": f"urn:mooring:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": _WHAT[kind.status],
        "instance": "/v1/instances",
        "code": kind.code,
        "request_id": "req_01m7ytn7kexrn34wn367q44k9v",
        "retryable": kind.retryable,
    }
    return {"summary": kind.title, "value": value}
