"""The OpenAPI document: FastAPI's, with Mooring's error model, headers, limits and links."""

import json
import re
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from mooring.api.openapi import limits, links, shared_responses
from mooring.schemas.agent import Heartbeat, JoinRequest, StartSecretsRequest, SyncRequest
from mooring.schemas.agent_streams import StreamRequestsQuery
from mooring_client.schemas.base import Json, Problem

DESCRIPTION = """GPU-as-a-Service on the GPU servers you own.

Send your API key as `Authorization: Bearer <key>` (use the **Authorize** button here). Every error is
`application/problem+json` with a stable `code`. POST requests accept an `Idempotency-Key`. Names of sizes end
in `_mib`, names of durations in `_s` (seconds). Values that the hardware does not support are `null`.
"""
TAGS = [
    {"name": "instances", "description": "Containers with GPUs, and their logs, metrics and events."},
    {"name": "instance groups", "description": "Instances that are placed together, for distributed jobs."},
    {"name": "volumes", "description": "Files that outlive the instances that mount them."},
    {"name": "reservations", "description": "GPUs reserved for a project for a period."},
    {"name": "queue", "description": "Pending instances in scheduling order, and what fits now."},
    {"name": "nodes", "description": "GPU servers, and the tokens that they join with."},
    {"name": "gpus", "description": "GPUs, their health, incidents and metrics."},
    {"name": "events", "description": "All changes, in order."},
    {"name": "projects", "description": "Projects, their members and quotas, and users."},
    {"name": "keys", "description": "API keys and the caller's identity."},
    {"name": "secrets", "description": "Write-only values for environment variables."},
    {"name": "registries", "description": "Credentials for image registries."},
    {"name": "templates", "description": "Named specs of instances with parameters."},
    {"name": "webhooks", "description": "Where events are sent."},
    {"name": "audit", "description": "The signed log of all privileged actions."},
    {"name": "service", "description": "Health and metrics of the service."},
    {"name": "agent", "description": "The protocol of node agents; not for users."},
]
_REF = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Serve the document at `/openapi.json`. It is built at the first request."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> Json:
    document = without_default_limits(app)
    limits.add(document)
    return document


def without_default_limits(app: FastAPI) -> Json:
    """The document with those limits only that the models state, and therefore enforce."""
    document = get_openapi(
        title="Mooring",
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/", "description": "this installation, production or test", "x-internal": False}],
    )
    schemas: dict[str, Any] = document["components"]["schemas"]
    # Mooring never sends FastAPI's error model.
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    # FastAPI does not know the models of problems and of the bodies that routes/agent.py parses.
    _keys, extra = models_json_schema(
        [
            (Problem, "serialization"),
            (JoinRequest, "validation"),
            (StreamRequestsQuery, "validation"),
            (SyncRequest, "validation"),
            (Heartbeat, "validation"),
            (StartSecretsRequest, "validation"),
        ],
        ref_template=_REF,
    )
    schemas.update({name: schema for name, schema in extra["$defs"].items() if name not in schemas})
    _set_summaries(document)
    _add_examples(document)
    shared_responses.complete(document)
    links.add(document)
    return document


def _set_summaries(document: Json) -> None:
    """Make the first sentence of each description its summary."""
    for _path, _method, operation in shared_responses.operations(document):
        summary, description = re.split(r"\.\s+", operation["description"], maxsplit=1)
        operation.update(summary=summary, description=description)


def _add_examples(document: Json) -> None:
    """Add `examples.json`: examples by schema, and texts by operation and media type."""
    examples = json.loads(files(__package__).joinpath("examples.json").read_bytes())

    def resolved(part: Any) -> Any:
        """Replace `$Name` by the first example of that schema."""
        if isinstance(part, dict):
            return {key: resolved(value) for key, value in part.items()}
        if isinstance(part, list):
            return [resolved(value) for value in part]
        is_reference = isinstance(part, str) and part.startswith("$") and not part.startswith("${")
        return resolved(examples[part[1:]][0]) if is_reference else part

    for name, schema in document["components"]["schemas"].items():
        if name in examples:
            schema["examples"] = resolved(examples[name])
    for _path, _method, operation in shared_responses.operations(document):
        for kind, content in operation["responses"].get("200", {}).get("content", {}).items():
            if (name := f"{operation['operationId']} {kind}") in examples:
                content["example"] = resolved(examples[name][0])
