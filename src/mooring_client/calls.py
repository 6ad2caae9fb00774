"""One request of an operation: its path, parameters and body. Pure; `aio` and `sync` send it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

T = TypeVar("T")


class Unset(Enum):
    """The default of a parameter for which null has a meaning of its own, such as "no limit"."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """A request.

    Attributes:
        operation: the `operationId` in the OpenAPI document.
        path: the path, with its IDs filled in.
        read: converts the body of a successful answer.
        params: query parameters; those that are None are not sent.
        body: the JSON body; None: no body.
        headers: further headers.
        extra_s: how long the answer may take beyond the client's timeout, such as for a long poll.
    """

    operation: str
    method: str
    path: str
    read: Callable[[bytes], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_s: float = 0

    @property
    def query(self) -> dict[str, Any]:
        return {name: _query_value(value) for name, value in self.params.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AppliedResource(Generic[T]):
    """A resource that was applied.

    Attributes:
        outcome: `created`, `changed` or `unchanged`. A request that was repeated because its answer was lost
            says `unchanged`, even if its first attempt was carried out.
    """

    resource: T
    outcome: str


def _query_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if hasattr(value, "isoformat") else value


def path(template: str, *values: str | int) -> str:
    """Fill the places `{}` of a path. A value cannot add parts to the path, such as `../`."""
    return template.format(*(_segment(str(value)) for value in values))


def _segment(value: str) -> str:
    # HTTP clients remove these two, also when they are quoted.
    if value in {"", ".", ".."}:
        raise ValueError(f"{value!r} is not an ID")
    return quote(value, safe="")


def body(**fields: Any) -> dict[str, Any]:
    """The fields that were given: neither None nor UNSET. Models become JSON without their defaults."""
    return {name: _json(value) for name, value in fields.items() if value is not None and value is not UNSET}


def changes(**fields: Any) -> dict[str, Any]:
    """As `body`, but None is sent as null: it removes a limit."""
    return {name: _json(value) for name, value in fields.items() if value is not UNSET}


def _json(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True, by_alias=True)
    if isinstance(value, Mapping):
        return {key: _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return to_jsonable_python(value)


def if_match(version: int | None) -> dict[str, str]:
    """The header that makes a change fail with PreconditionFailed if the resource has another version."""
    return {} if version is None else {"If-Match": f'"{version}"'}
