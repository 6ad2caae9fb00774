"""The shapes that every answer shares."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mooring.core.text import Text

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Answer(BaseModel):
    """What we send. Clients should ignore members that they do not know."""

    model_config = ConfigDict(frozen=True)


class Body(BaseModel):
    """What users send: unknown fields are refused and nothing is coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FieldError(Answer):
    pointer: Annotated[str, Field(description="JSON pointer into the body, or the name of a parameter")]
    code: str
    message: str


class Problem(BaseModel):
    """An error, as RFC 9457 has it. `code` is stable and listed in docs/errors.md."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: Annotated[str | None, Field(description="the path that was asked for")] = None
    code: str
    request_id: str
    retryable: bool
    errors: list[FieldError] | None = None


def timestamp(moment: datetime | None) -> str | None:
    """RFC 3339 with milliseconds: `2026-11-21T08:00:00.123Z`. The moment is in UTC, as every stored one."""
    return None if moment is None else f"{moment.isoformat(timespec='milliseconds')[:-6]}Z"


Timestamp = Annotated[Text, Field(json_schema_extra={"format": "date-time"})]
Json = dict[str, Any]
