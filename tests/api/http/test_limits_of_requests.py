"""The OpenAPI document states a limit for every value; those of requests must be enforced."""

from collections.abc import Iterator
from typing import Any

import pytest

from mooring.api.app import create_app
from mooring.api.context import Context
from mooring.api.openapi import document
from mooring.api.openapi.shared_responses import operations
from tests.nodes import WireNode
from tests.service import Client, RunningService

# What the models of these schemas do not limit, a validator does: see the tests below.
_LIMITED_BY_A_VALIDATOR = {"Reason.code", "Reason.message"}


class RequestValues:
    """The values in all requests of a document, each once, with its field or parameter."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._seen: set[str] = set()

    def values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, _method, operation in operations(self._document):
            for parameter in operation.get("parameters", ()):
                if parameter["in"] != "path":  # a path that is too long is not found
                    yield from self._parts(parameter["schema"], f"{path} {parameter['name']}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield from self._parts(content["schema"], path)

    def _parts(self, schema: Any, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(schema, dict):
            return
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in self._seen:
            self._seen.add(name)
            yield from self._parts(self._document["components"]["schemas"][name], name)
        yield field, schema
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for part in schema.get(key, ()):
                yield from self._parts(part, field)
        for property_name, part in schema.get("properties", {}).items():
            yield from self._parts(part, f"{field}.{property_name}")
        for key in ("items", "additionalProperties", "propertyNames"):
            yield from self._parts(schema.get(key), field)


def _is_limited(schema: dict[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return True
    match schema.get("type"):
        case "integer":
            lower = {"minimum", "exclusiveMinimum"} & schema.keys()
            return bool(lower and {"maximum", "exclusiveMaximum"} & schema.keys())
        case "string":
            return "maxLength" in schema
        case "array":
            return "maxItems" in schema
    return True


def test_requests_state_every_limit(service: RunningService) -> None:
    """A limit that only the document states would not be enforced."""
    context: Context = service.service._server._context
    stated = document.without_default_limits(create_app(context))
    values = list(RequestValues(stated).values())
    assert len(values) > 500
    without = {field for field, schema in values if not _is_limited(schema)}
    assert without == _LIMITED_BY_A_VALIDATOR


@pytest.mark.parametrize("field", ["code", "message"])
@pytest.mark.parametrize("text", ["x" * 4097, "\x00"], ids=["long", "NUL"])
def test_the_reason_of_a_report_is_limited(client: Client, node: WireNode, field: str, text: str) -> None:
    body = node.report().model_dump(mode="json")
    assert _schema_limit(client, field) == 4096
    reason = {"code": "docker_unavailable", "message": "no answer", field: text}
    answer = node.http.post("/agent/v1/sync", json={**body, "problem": reason})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == "/problem"


def _schema_limit(client: Client, field: str) -> int:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    return int(schemas["Reason"]["properties"][field]["maxLength"])


def test_a_heartbeat_with_too_large_a_number_is_rejected(node: WireNode) -> None:
    node.sync()
    process = {"pid": 2**63, "name": "", "memory_used_mib": 0}
    sample = {"uuid": "GPU-1", "index": 0, "sampled_at": "2026-11-21T08:00:00.000Z", "processes": [process]}
    answer = node.post_heartbeat(samples=[sample])
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == "/samples/0/processes/0/pid"
