"""Schemas of dry runs of a PUT by name: what it would do."""

from typing import Annotated, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer


class FieldChange(Answer):
    """A field that differs. Values of `env` are not shown."""

    pointer: Annotated[str, Field(description="JSON pointer into the body")]
    before: Annotated[str | None, Field(description="the present value as JSON; null: none, or not shown")]
    after: Annotated[str | None, Field(description="the requested value as JSON; null: none, or not shown")]
    fixed: Annotated[bool, Field(description="cannot be changed: it needs a new resource")]


class ApplyPlan(Answer):
    """What a request would do. `requires_replacement`: it would be answered 409."""

    outcome: Literal["created", "changed", "unchanged", "requires_replacement"]
    id: Annotated[str | None, Field(description="of the existing resource; null: there is none")]
    changes: list[FieldChange]
