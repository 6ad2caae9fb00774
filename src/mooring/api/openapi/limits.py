"""Default limits of all values, written into those schemas of the OpenAPI document that state none.

Only answers and paths have such values: bodies, query parameters and headers state each limit, or it would
not be enforced. Integers are stored in 64 bits. Texts of users and nodes are `Text` (schemas/text.py of the
client), with a maximum length and without NUL; Mooring writes no longer ones. No list is longer than a report
allows.
"""

from collections.abc import Iterator
from typing import Any

from mooring.api.openapi.shared_responses import operations
from mooring_client.schemas.base import Json
from mooring_client.schemas.gpus import LONGEST_LIST
from mooring_client.schemas.text import LONGEST_TEXT, NO_NUL

_INT32, _INT64 = 2**31, 2**63
# Keywords of JSON Schema whose value is a list of schemas, a map of schemas, or one schema.
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs")
_SINGLE = ("items", "additionalProperties", "propertyNames", "not")


def add(document: Json) -> None:
    """Add the limits to all schemas of the document."""
    for _path, _method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            parameter["schema"] = _without_null(parameter["schema"])
    for schema in _roots(document):
        for part in _parts(schema):
            _limit(part)


def _without_null(schema: Json) -> Json:
    """Remove null from a parameter's schema: a parameter can be absent, but not null."""
    left = [part for part in schema.get("anyOf", ()) if part != {"type": "null"}]
    if len(left) != 1:
        return schema
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **left[0]}


def _roots(document: Json) -> Iterator[Json]:
    components: dict[str, dict[str, Any]] = document["components"]
    yield from components["schemas"].values()
    for header in components["headers"].values():
        yield header["schema"]
    for answer in components["responses"].values():
        yield from _content(answer)
    for _path, _method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            yield parameter["schema"]
        for message in (operation.get("requestBody", {}), *operation["responses"].values()):
            yield from _content(message)


def _content(message: Json) -> Iterator[Json]:
    """Yield the schemas of a request or response. Remove those of text: a stream of text has no limit."""
    for kind, content in message.get("content", {}).items():
        if kind.startswith("text/"):
            content.pop("schema", None)
        elif "schema" in content:
            yield content["schema"]


def _parts(schema: Any) -> Iterator[Json]:
    """Yield a schema and the schemas inside it, but not its examples and defaults."""
    if not isinstance(schema, dict):
        return  # additionalProperties: true
    yield schema
    for key in _LISTS:
        for part in schema.get(key, ()):
            yield from _parts(part)
    for key in _MAPS:
        for part in schema.get(key, {}).values():
            yield from _parts(part)
    for key in _SINGLE:
        yield from _parts(schema.get(key))


def _limit(schema: Json) -> None:
    kind = schema.get("type")
    if "patternProperties" in schema:
        _replace_pattern_properties(schema)
    if "enum" in schema or "const" in schema:
        return
    if kind == "integer":
        _limit_integer(schema)
    elif kind == "string":
        schema.setdefault("maxLength", LONGEST_TEXT)
        if "format" not in schema:
            schema.setdefault("pattern", NO_NUL)
    elif kind == "array":
        schema.setdefault("maxItems", LONGEST_LIST)


def _replace_pattern_properties(schema: Json) -> None:
    """Replace `patternProperties` by a pattern for all names: pydantic accepts no other names."""
    ((pattern, value),) = schema.pop("patternProperties").items()
    schema["propertyNames"] = {"pattern": pattern, **schema.get("propertyNames", {})}
    schema["additionalProperties"] = value


def _limit_integer(schema: Json) -> None:
    # FastAPI's model of a document rounds bounds to floats: the largest 64-bit integers become larger.
    if "exclusiveMinimum" not in schema:
        schema["minimum"] = max(int(schema.get("minimum", -_INT64)), -_INT64)
    if "exclusiveMaximum" not in schema:
        schema["maximum"] = min(int(schema.get("maximum", _INT64)), _INT64 - 1)
    lowest: int = schema["minimum"] if "minimum" in schema else schema["exclusiveMinimum"] + 1
    highest: int = schema["maximum"] if "maximum" in schema else schema["exclusiveMaximum"] - 1
    schema.setdefault("format", "int32" if lowest >= -_INT32 and highest < _INT32 else "int64")
