"""The OpenAPI document: what FastAPI derives, with our error model in the place of its own."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mooring.api.openapi import answers, limits, links
from mooring.core.instance.spec import InstanceSpec
from mooring.schemas.agent import JoinRequest, StartSecretsRequest, SyncRequest
from mooring.schemas.agent_streams import StreamRequestsQuery
from mooring.schemas.base import Answer, Json, Problem

DESCRIPTION = """GPU-as-a-Service on the GPU servers you own.

Send your key as `Authorization: Bearer <key>` (the **Authorize** button here). Every error is
`application/problem+json` with a stable `code`. POSTs take an `Idempotency-Key`. Sizes end in `_mib`,
durations in `_s`; a value that the hardware does not support is `null`.
"""
TAGS = [
    {"name": "instances", "description": "Containers that hold GPUs."},
    {"name": "instance groups", "description": "Instances placed all together, that find one another."},
    {"name": "reservations", "description": "GPUs kept for a project for a time."},
    {"name": "queue", "description": "What waits, in which order, and what still fits."},
    {"name": "nodes", "description": "The machines, and how they join."},
    {"name": "gpus", "description": "The cards, their health and live figures."},
    {"name": "events", "description": "Every change, in order."},
    {"name": "projects", "description": "Tenants, their members and their quotas; the users of all of them."},
    {"name": "keys", "description": "API keys, and who the caller is."},
    {"name": "secrets", "description": "Values that only containers see."},
    {"name": "registries", "description": "What a project's images are pulled with."},
    {"name": "audit", "description": "Who did what, in a chain that cannot be rewritten."},
    {"name": "service", "description": "Health and figures of the service itself."},
    {"name": "agent", "description": "What nodes call; for agents only."},
]
_REF = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Make `/openapi.json` serve the amended document, built once."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> Json:
    made = get_openapi(
        title="Mooring",
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[
            {
                "url": "/",
                "description": "the installation that sent this, production or test",
                "x-internal": False,
            }
        ],
    )
    schemas: dict[str, Any] = made["components"]["schemas"]
    # FastAPI's own error model is never sent.
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    _keys, extra = models_json_schema(
        [
            (Problem, "serialization"),
            (JoinRequest, "validation"),
            (StreamRequestsQuery, "validation"),
            (SyncRequest, "validation"),
            (StartSecretsRequest, "validation"),
        ],
        ref_template=_REF,
    )
    schemas.update({name: schema for name, schema in extra["$defs"].items() if name not in schemas})
    _restore_examples(schemas, Answer)
    _restore_examples(schemas, InstanceSpec)
    answers.complete(made)
    links.add(made)
    limits.state(made)
    return made


def _restore_examples(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    """Put back the nulls that FastAPI drops from the examples of a model and its subclasses."""
    extra = model.model_config.get("json_schema_extra")
    if isinstance(extra, dict) and model.__name__ in schemas:
        schemas[model.__name__].update(extra)
    for derived in model.__subclasses__():
        _restore_examples(schemas, derived)
