"""Base classes and common types of the schemas."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Answer(BaseModel):
    """The base of all answers. Clients should ignore fields that they do not know."""

    model_config = ConfigDict(frozen=True)


class Status(Answer):
    """The state of the service."""

    status: str


class Body(BaseModel):
    """The base of all request bodies. Unknown fields and values of other types are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


LONGEST_DETAIL = 4096
# The size limit of a request's head, which api/http/edge.py enforces.
LONGEST_PATH = 65_536
ErrorCode = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=64)]


class FieldError(Answer):
    pointer: Annotated[str, Field(description="JSON pointer into the body, or a parameter's name")]
    code: ErrorCode
    message: Annotated[str, Field(max_length=LONGEST_DETAIL)]


class Problem(BaseModel):
    """An error in the format of RFC 9457. `code` is stable and listed in docs/errors.md."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, StringConstraints(pattern=r"^urn:mooring:error:[a-z0-9_]+$", max_length=128)]
    title: Annotated[str, Field(max_length=128)]
    status: Annotated[int, Field(ge=400, le=599)]
    detail: Annotated[str, Field(max_length=LONGEST_DETAIL)]
    instance: Annotated[
        str | None,
        Field(
            max_length=LONGEST_PATH,
            pattern=r"^[\s\S]*$",
            description="the requested path; null: it could not be read",
        ),
    ]
    code: ErrorCode
    request_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]+$", max_length=128)]
    retryable: bool
    errors: Annotated[list[FieldError], Field(max_length=100, description="for 422: the invalid fields")] = []


def timestamp(time: datetime | None) -> str | None:
    """Format a UTC time as RFC 3339 with milliseconds: `2026-11-21T08:00:00.123Z`."""
    return None if time is None else f"{time.isoformat(timespec='milliseconds')[:-6]}Z"


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def timestamp_of(seconds: float | None) -> str | None:
    """Format seconds since 1970, the scheduler's times, like `timestamp`. None after the year 9999."""
    if seconds is None:
        return None
    try:
        # Round: the float of a time in the far future is a few microseconds off.
        return timestamp(_EPOCH + timedelta(milliseconds=round(seconds * 1000)))
    except OverflowError:
        return None


Timestamp = Annotated[
    str,
    StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", max_length=24),
    Field(json_schema_extra={"format": "date-time"}),
]


_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _require_rfc_3339(value: object) -> object:
    """Reject what pydantic also accepts: numbers, dates without a time, and times without a time zone."""
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        return value
    raise PydanticCustomError("datetime_format", "must be RFC 3339 with a zone, such as 2026-11-21T08:00:00Z")


def _in_utc(time: datetime) -> datetime:
    """Convert to UTC with milliseconds. A year above 9999 could be stored in PostgreSQL, but not be read."""
    try:
        time = time.astimezone(UTC)
    except OverflowError:
        raise PydanticCustomError("datetime_format", "must be in the years 1 to 9999 in UTC") from None
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


RequestTime = Annotated[
    datetime,
    Field(strict=False, json_schema_extra={"maxLength": 64}),
    BeforeValidator(_require_rfc_3339),
    AfterValidator(_in_utc),
]
Json = dict[str, Any]
