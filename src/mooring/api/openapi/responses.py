"""The error responses that an operation declares in the OpenAPI document."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from mooring.core import errors as tree
from mooring.core.errors import MooringError
from mooring.schemas.base import PROBLEM_MEDIA_TYPE, Json

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
Kinds = Iterable[type[MooringError]]
# Errors of the layers around every operation; then errors that any operation may raise.
ANY_REQUEST: Final[Kinds] = (
    *(tree.BadRequest, tree.MalformedRequest, tree.RequestTimeout),
    *(tree.TooLarge, tree.HeadersTooLarge, MooringError),
)
WITH_CREDENTIALS: Final[Kinds] = (tree.Unauthorized, tree.Forbidden, tree.TooManyRequests)
_REST = (tree.Invalid, tree.Unavailable, tree.DatabaseUnavailable, tree.SsoUnavailable)
ALWAYS: Final = frozenset({*ANY_REQUEST, *WITH_CREDENTIALS, *_REST})
# Errors of a body with an instance spec; errors of a spec that is checked against the rules of its project.
SPEC: Final = (tree.NotSupportedYet, tree.ReservedEnv, tree.ReservedLabel, tree.SpecTooLarge)
ADMISSION: Final = (
    *(tree.GpuSharingNotAllowed, tree.ImageNotAllowed, tree.NodeSelectorConflict, tree.PriorityNotAllowed),
    *(tree.RegistryNotAllowed, tree.SecretsTooLarge, tree.TooManyPorts, tree.UnknownSecret),
)

Responses = dict[int | str, dict[str, Any]]


def errors(*kinds: type[MooringError]) -> Responses:
    """Return the error responses of an operation: these errors, and those of every operation.

    `shared_responses.complete` adds the errors that follow from its parameters and its action.
    """
    return {status: problem(of_status) for status, of_status in by_status((*ALWAYS, *kinds)).items()}


def by_status(kinds: Kinds) -> dict[int, list[type[MooringError]]]:
    found: dict[int, list[type[MooringError]]] = {}
    for kind in sorted(set(kinds), key=lambda kind: (kind.status, kind.code)):
        found.setdefault(kind.status, []).append(kind)
    return found


def problem(kinds: list[type[MooringError]]) -> dict[str, Any]:
    """Return the response of one status: its description lists the codes, and each has an example."""
    codes = ", ".join(f"`{kind.code}`" for kind in kinds)
    examples = {kind.code: {"$ref": f"#/components/examples/{kind.code}"} for kind in kinds}
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}
    description = f"{_DESCRIPTIONS[kinds[0].status]} Codes: {codes}."
    return {"description": description, "content": {PROBLEM_MEDIA_TYPE: content}}


def declared(operation: Json) -> Iterator[type[MooringError]]:
    """Yield the error classes that an operation declares with `errors`."""
    for answer in operation["responses"].values():
        for code in answer.get("content", {}).get(PROBLEM_MEDIA_TYPE, {}).get("examples", ()):
            yield MooringError.by_code.get(code, MooringError)


def example(kind: type[MooringError]) -> dict[str, Any]:
    """Return an example. Without one, Swagger UI generates noise that matches the patterns."""
    value = {
        "type": f"urn:mooring:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": _DESCRIPTIONS[kind.status],
        "instance": "/v1/instances",
        "code": kind.code,
        "request_id": "req_01m7ytn7kexrn34wn367q44k9v",
        "retryable": kind.retryable,
    }
    return {"summary": kind.title, "value": value}
