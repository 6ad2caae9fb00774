"""Reading what the server answers: models, also of newer and older servers, and errors."""

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from mooring_client.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    MooringError,
    NotFound,
    PreconditionFailed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from mooring_client.failures import BadAnswer, ConnectionFailed

M = TypeVar("M", bound=BaseModel)
_MEMBERS_OF_PROBLEMS = frozenset(
    {"type", "title", "status", "detail", "instance", "code", "request_id", "retryable"}
)
# For codes of newer servers: the nearest known error with that status.
_BY_STATUS: Mapping[int, type[MooringError]] = {
    each.status: each
    for each in (
        BadRequest, Unauthorized, Forbidden, NotFound, Conflict, Gone, PreconditionFailed, Invalid,
        TooManyRequests, Unavailable,
    )
}  # fmt: skip


def nothing(_content: bytes) -> None:
    """Read an answer without a body."""


def text(content: bytes) -> str:
    return content.decode(errors="replace")


def json(content: bytes) -> Any:
    """Read any JSON; None: the answer has no body.

    Raises:
        BadAnswer: it is not JSON.
    """
    try:
        return from_json(content) if content else None
    except ValueError:
        raise BadAnswer(f"the answer is not JSON: {_beginning(content)}; check the URL") from None


def model(kind: type[M]) -> Callable[[bytes], M]:
    """A reader of this model. It raises BadAnswer if the body is no JSON object."""
    return lambda content: read_model(kind, content)


def read_model(kind: type[M], content: bytes) -> M:
    """Read a model. Unknown fields are ignored; see `_tolerant` for what else differs.

    Raises:
        BadAnswer: the content is no JSON object, or has none of the model's required fields.
    """
    try:
        return kind.model_validate_json(content, extra="ignore", strict=False)
    except ValidationError:
        return read_object(kind, json(content))


def read_object(kind: type[M], data: object) -> M:
    """As `read_model`, of parsed JSON."""
    required = [field.alias or name for name, field in kind.model_fields.items() if field.is_required()]
    if not isinstance(data, dict) or not (data.keys() & required or not required):
        raise BadAnswer(f"the answer is not a {kind.__name__} of Mooring; check the URL")
    return _tolerant(kind, data)


def _tolerant(kind: type[M], data: dict[str, Any]) -> M:
    """Read the answer of a newer or older server.

    A value that this release does not know, such as a new state, stays as it is in JSON. A missing field is
    its default, or None.
    """
    try:
        return kind.model_validate(data, extra="ignore", strict=False)
    except ValidationError:
        values = {}
        for name, field in kind.model_fields.items():
            given = data.get(field.alias or name, data.get(name))
            if given is None:
                values[name] = None if field.is_required() else field.get_default(call_default_factory=True)
            else:
                values[name] = _value(field.rebuild_annotation(), given)
        return kind.model_construct(**values)


def _value(annotation: Any, given: Any) -> Any:
    try:
        return _adapter(annotation).validate_python(given, extra="ignore", strict=False)
    except ValidationError:
        pass
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], given)
    if origin in {Union, types.UnionType}:
        models = [each for each in arguments if each is not type(None)]
        return _value(models[0], given) if len(models) == 1 else given
    if origin is list and isinstance(given, list):
        return [_value(arguments[0], each) for each in given]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(given, dict):
        return _tolerant(annotation, given)
    return given


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def error(status: int, content: bytes, retry_after: str | None) -> MooringError | ConnectionFailed:
    """The error that an answer states. Its class follows from the code, or from the status if that is new.

    A proxy's own 502, 503 or 504 counts as a lost connection, its own 429 as TooManyRequests.

    Raises:
        BadAnswer: it is no error of Mooring.
    """
    try:
        problem = from_json(content)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        message = f"{status} from something that is not Mooring: {_beginning(content)}"
        if status in {502, 503, 504}:
            return ConnectionFailed(message, may_have_taken_effect=True)
        if status == TooManyRequests.status:
            return TooManyRequests(message, retry_after_s=seconds(retry_after))
        raise BadAnswer(f"{message}; check the URL")
    kind = _class_of(problem["code"], status, retryable=problem.get("retryable") is True)
    found = kind(str(problem.get("detail", "")), retry_after_s=seconds(retry_after))
    # Not as arguments: a server may choose names such as `message`.
    found.fields = {name: value for name, value in problem.items() if name not in _MEMBERS_OF_PROBLEMS}
    found.request_id = problem.get("request_id")
    return found


def redirect(location: str | None) -> BadAnswer:
    """The failure of a request that is redirected: its key could be sent to another server."""
    return BadAnswer(f"the server redirects to {location}; use that URL")


def error_in_stream(stated: Mapping[str, Any]) -> MooringError:
    """The error with which the server ended a stream."""
    kind = _class_of(str(stated.get("code", "")), Unavailable.status, retryable=True)
    return kind(str(stated.get("message", "")))


def seconds(retry_after: str | None) -> int | None:
    """The seconds of a Retry-After header; None: absent, or a date, which Mooring never sends."""
    return int(retry_after) if retry_after is not None and retry_after.isdecimal() else None


def _class_of(code: str, status: int, *, retryable: bool) -> type[MooringError]:
    if (known := MooringError.by_code.get(code)) is not None:
        return known
    nearest = _BY_STATUS.get(status, MooringError)
    facts = {"code": code, "status": status, "retryable": retryable, "known": False}
    return types.new_class("NewerError", (nearest,), facts)


def _beginning(content: bytes) -> str:
    return " ".join(content[:200].decode(errors="replace").split()) or "an empty answer"
