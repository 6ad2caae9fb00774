"""Links of the OpenAPI document, from the response that contains an id to the operations that need it.

They follow from the paths: `/v1/things` links to the operations below `/v1/things/{thing_id}`.
"""

import re
from collections.abc import Iterator
from typing import Any

from mooring.api.openapi.shared_responses import operations
from mooring_client.schemas.base import Json

_PARAMETER = re.compile(r"\{(\w+)\}")
_ITEM = re.compile(r"^(?P<collection>.+)/\{(?P<parameter>\w+)\}(/[^{]*)?$")
# The other paths with parameters are for agents, which follow no links.
_USER_PATHS = "/v1/"


def add(document: Json) -> None:
    """Link each collection's answers to the operations on its members."""
    for path, _method, operation in list(operations(document)):
        item = _ITEM.match(path)
        if item is None or not path.startswith(_USER_PATHS):
            continue
        for answer, base in _answers_of(document, item["collection"]):
            key = _key(document, answer, base, item["parameter"])
            if key is not None:
                outer = {name: f"$request.path.{name}" for name in _PARAMETER.findall(item["collection"])}
                answer.setdefault("links", {})[operation["operationId"]] = {
                    "operationId": operation["operationId"],
                    "parameters": {**outer, item["parameter"]: f"$response.body#{base}/{key}"},
                }


def _answers_of(document: Json, collection: str) -> Iterator[tuple[Json, str]]:
    """Yield the answers that contain a member, with the pointer to it."""
    item = document["paths"].get(collection, {})
    created = item.get("post", {}).get("responses", {}).get("201")
    if created is not None:
        yield created, ""
    listed = item.get("get", {}).get("responses", {}).get("200")
    if listed is not None:
        yield listed, "/items/0"


def _key(document: Json, answer: Json, base: str, parameter: str) -> str | None:
    """Return the property with the parameter's value: the property of the same name, else `id`."""
    schema = _resolved(document, answer.get("content", {}).get("application/json", {}).get("schema", {}))
    if base:
        items = schema.get("properties", {}).get("items", {}).get("items", {})
        schema = _resolved(document, items)
    found: dict[str, Any] = schema.get("properties", {})
    return next((name for name in (parameter, "id") if name in found), None)


def _resolved(document: Json, schema: Json) -> Json:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    resolved: Json = document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
    return resolved
