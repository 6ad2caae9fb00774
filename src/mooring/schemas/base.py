"""The shapes that every answer shares."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Answer(BaseModel):
    """What we send. Clients should ignore members that they do not know."""

    model_config = ConfigDict(frozen=True)


class Body(BaseModel):
    """What users send: unknown fields are refused and nothing is coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


LONGEST_DETAIL = 4096
# A path has no more characters than a request's head may have bytes; api/edge.py counts them.
LONGEST_PATH = 65_536
ErrorCode = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=64)]


class FieldError(Answer):
    pointer: Annotated[str, Field(description="JSON pointer into the body, or the name of a parameter")]
    code: ErrorCode
    message: Annotated[str, Field(max_length=LONGEST_DETAIL)]


class Problem(BaseModel):
    """An error, as RFC 9457 has it. `code` is stable and listed in docs/errors.md."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, StringConstraints(pattern=r"^urn:mooring:error:[a-z0-9_]+$", max_length=128)]
    title: Annotated[str, Field(max_length=128)]
    status: Annotated[int, Field(ge=400, le=599)]
    detail: Annotated[str, Field(max_length=LONGEST_DETAIL)]
    instance: Annotated[
        str | None,
        Field(max_length=LONGEST_PATH, description="the path that was asked for; null: it could not be read"),
    ]
    code: ErrorCode
    request_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]+$", max_length=128)]
    retryable: bool
    errors: Annotated[
        list[FieldError], Field(max_length=100, description="with 422: each place that is wrong")
    ] = []


def timestamp(moment: datetime | None) -> str | None:
    """RFC 3339 with milliseconds: `2026-11-21T08:00:00.123Z`. The moment is in UTC, as every stored one."""
    return None if moment is None else f"{moment.isoformat(timespec='milliseconds')[:-6]}Z"


Timestamp = Annotated[
    str,
    StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", max_length=24),
    Field(json_schema_extra={"format": "date-time"}),
]
Json = dict[str, Any]
