"""The shapes that every answer shares."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Answer(BaseModel):
    """What we send. Clients should ignore members that they do not know."""

    model_config = ConfigDict(frozen=True)


class Body(BaseModel):
    """What users send: unknown fields are refused and nothing is coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


LONGEST_DETAIL = 4096
# A path has no more characters than a request's head may have bytes; api/http/edge.py counts them.
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
        Field(
            max_length=LONGEST_PATH,
            pattern=r"^[\s\S]*$",
            description="the path that was asked for, as it came; null: it could not be read",
        ),
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


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def timestamp_of(seconds: float | None) -> str | None:
    """As `timestamp`, of a moment of the scheduler's, in seconds since 1970; null beyond the year 9999."""
    if seconds is None:
        return None
    try:
        # Rounded, since a far moment as a float lies some microseconds off.
        return timestamp(_EPOCH + timedelta(milliseconds=round(seconds * 1000)))
    except OverflowError:
        return None


Timestamp = Annotated[
    str,
    StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", max_length=24),
    Field(json_schema_extra={"format": "date-time"}),
]


_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _refuse_other_than_rfc_3339(value: object) -> object:
    """pydantic would also take a number, a date alone, and a time of nowhere in particular."""
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        return value
    raise PydanticCustomError("datetime_format", "must be RFC 3339 with a zone, such as 2026-11-21T08:00:00Z")


def _in_utc(moment: datetime) -> datetime:
    """As it is stored and shown. What has no year in UTC, PostgreSQL would store, and never give back."""
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise PydanticCustomError(
            "datetime_format", "lies beyond the year 9999, or before the year 1"
        ) from None
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


# What users send.
Moment = Annotated[
    datetime,
    Field(strict=False, json_schema_extra={"maxLength": 64}),
    BeforeValidator(_refuse_other_than_rfc_3339),
    AfterValidator(_in_utc),
]
Json = dict[str, Any]
