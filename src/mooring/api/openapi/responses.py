"""The error responses that an operation declares in the OpenAPI document."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from mooring_client import errors as core_errors
from mooring_client.errors import MooringError
from mooring_client.schemas.base import PROBLEM_MEDIA_TYPE, Json

_DESCRIPTIONS = {
    400: "The path, query, a header, the cursor or the JSON of the body is malformed.",
    401: "The credentials are missing or invalid.",
    403: "The credentials do not permit this operation, or a quota or rule of the project forbids it.",
    404: "The resource does not exist, or you may not see it.",
    408: "The request did not arrive in time.",
    409: "The request conflicts with the state of a resource or with an earlier request, or cannot complete.",
    410: "The requested events are not available.",
    412: "The resource has changed since you read it.",
    413: "The body is larger than 1 MiB (a node's report: 16 MiB) or, from a user, has over 4000 values.",
    415: "The `Content-Type` of the body is not JSON.",
    426: "The operation needs a WebSocket.",
    422: "A field, parameter or header is missing, unknown or not valid for this request.",
    429: "A limit on requests, streams or daily writes is reached. Retry after the time in `Retry-After`.",
    431: "The path, query and headers are too large, or there are too many parameters or headers.",
    500: "A bug in Mooring. The log of the control plane has the cause under the `request_id`.",
    503: "The server, database, node or sign-on is unavailable. Retry after the time in `Retry-After`.",
}
ErrorClasses = Iterable[type[MooringError]]
# Errors of the layers around every operation.
ANY_REQUEST: Final = (
    core_errors.BadRequest, core_errors.MalformedRequest, core_errors.RequestTimeout, core_errors.TooLarge,
    core_errors.HeadersTooLarge, MooringError,
)  # fmt: skip
# Errors of every operation that needs credentials.
WITH_CREDENTIALS: Final = (core_errors.Unauthorized, core_errors.Forbidden, core_errors.TooManyRequests)
# Declared for every operation; `shared_responses.complete` removes WITH_CREDENTIALS from public ones.
ALWAYS: Final = frozenset({
    *ANY_REQUEST, *WITH_CREDENTIALS,
    core_errors.Invalid, core_errors.Unavailable, core_errors.DatabaseUnavailable, core_errors.SsoUnavailable,
})  # fmt: skip
# Errors of a body with an instance spec.
SPEC: Final = (
    core_errors.NotSupportedYet, core_errors.ReservedEnv, core_errors.ReservedLabel, core_errors.SpecTooLarge
)  # fmt: skip
# Errors of a spec that is checked against the rules of its project.
ADMISSION: Final = (
    core_errors.GpuSharingNotAllowed, core_errors.ImageNotAllowed, core_errors.NodeSelectorConflict,
    core_errors.PriorityNotAllowed, core_errors.PublicPortsNotAllowed, core_errors.RegistryNotAllowed,
    core_errors.SecretsTooLarge, core_errors.TooManyPorts, core_errors.UnknownSecret,
    core_errors.UnknownVolume, core_errors.VolumesApart,
)  # fmt: skip

Responses = dict[int | str, dict[str, Any]]


def errors(*error_classes: type[MooringError]) -> Responses:
    """Return the error responses of an operation: for these errors, and for those that are always declared.

    `shared_responses.complete` adds the errors that follow from its parameters, body and action class.
    """
    return {status: problem(found) for status, found in by_status((*ALWAYS, *error_classes)).items()}


def by_status(error_classes: ErrorClasses) -> dict[int, list[type[MooringError]]]:
    found: dict[int, list[type[MooringError]]] = {}
    for each in sorted(set(error_classes), key=lambda each: (each.status, each.code)):
        found.setdefault(each.status, []).append(each)
    return found


def problem(error_classes: list[type[MooringError]]) -> dict[str, Any]:
    """Return the response for errors of one status. It lists their codes, with an example for each."""
    codes = ", ".join(f"`{each.code}`" for each in error_classes)
    examples = {each.code: {"$ref": f"#/components/examples/{each.code}"} for each in error_classes}
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}
    description = f"{_DESCRIPTIONS[error_classes[0].status]} Codes: {codes}."
    return {"description": description, "content": {PROBLEM_MEDIA_TYPE: content}}


def declared(operation: Json) -> Iterator[type[MooringError]]:
    """Yield the error classes that an operation declares with `errors`."""
    for answer in operation["responses"].values():
        for code in answer.get("content", {}).get(PROBLEM_MEDIA_TYPE, {}).get("examples", ()):
            yield MooringError.by_code.get(code, MooringError)


def example(error_class: type[MooringError]) -> dict[str, Any]:
    """Return an example. Without it, Swagger UI shows random text that matches the patterns of the schema."""
    value = {
        "type": f"urn:mooring:error:{error_class.code}",
        "title": error_class.title,
        "status": error_class.status,
        "detail": _DESCRIPTIONS[error_class.status],
        "instance": "/v1/instances",
        "code": error_class.code,
        "request_id": "req_01m7ytn7kexrn34wn367q44k9v",
        "retryable": error_class.retryable,
    }
    return {"summary": error_class.title, "value": value}
