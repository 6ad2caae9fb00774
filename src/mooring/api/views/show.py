"""Builds the JSON of an answer from a row. The answer's schema is the only list of its fields."""

from collections.abc import Collection
from datetime import datetime
from functools import cache
from typing import Any

from pydantic import BaseModel

from mooring_client.schemas.base import Json, timestamp


def show(schema: type[BaseModel], row: object, without: Collection[str] = (), /, **derived: Any) -> Json:
    """Return the fields of `schema`, each from `derived` or else from the row's attribute of that name.

    Values are not validated (decision 6). The tests compare answers with the schema.

    Args:
        without: fields of the schema to leave out.

    Raises:
        AttributeError: the row has no such attribute, and `derived` no such value.
    """
    return {
        key: derived[name] if name in derived else _json(getattr(row, name))
        for name, key in _fields(schema, frozenset(without))
    }


@cache
def _fields(schema: type[BaseModel], without: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return attribute and JSON names. Cached: reading them from the model doubles the time of `show`."""
    fields = schema.model_fields.items()
    return tuple((name, field.alias or name) for name, field in fields if name not in without)


def _json(value: Any) -> Any:
    return timestamp(value) if isinstance(value, datetime) else value
