"""The OpenAPI document is valid and complete, and the service answers as the document says."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from tests.service import Client, running, settings_for

ENDPOINTS = {
    "POST /v1/instances": "create_instance",
    "GET /v1/instances": "list_instances",
    "GET /v1/instances/{instance_id}": "get_instance",
    "PUT /v1/instances/{instance_id}": "put_instance",
    "PUT /v1/instances/by-name/{name}": "apply_instance",
    "PUT /v1/instance-groups/by-name/{name}": "apply_instance_group",
    "PUT /v1/reservations/by-name/{name}": "apply_reservation",
    "PUT /v1/projects/by-name/{name}": "apply_project",
    "PUT /v1/volumes/{volume_id}": "put_volume",
    "PUT /v1/volumes/by-name/{name}": "apply_volume",
    "POST /v1/volumes": "create_volume",
    "GET /v1/volumes": "list_volumes",
    "GET /v1/volumes/{volume_id}": "get_volume",
    "PATCH /v1/volumes/{volume_id}": "update_volume",
    "DELETE /v1/volumes/{volume_id}": "delete_volume",
    "PATCH /v1/instances/{instance_id}": "update_instance",
    "DELETE /v1/instances/{instance_id}": "delete_instance",
    "POST /v1/instances/{instance_id}/stop": "stop_instance",
    "POST /v1/instances/{instance_id}/start": "start_instance",
    "POST /v1/instances/{instance_id}/restart": "restart_instance",
    "GET /v1/instances/{instance_id}/wait": "wait_for_instance",
    "GET /v1/instances/{instance_id}/logs": "get_instance_logs",
    "POST /v1/instances/{instance_id}/exec": "exec_in_instance",
    "GET /v1/instances/{instance_id}/exec/stream": "stream_exec_in_instance",
    "GET /v1/instances/{instance_id}/attach/stream": "stream_attach_to_instance",
    "GET /v1/instances/{instance_id}/ports/{port}/stream": "stream_instance_port",
    "POST /v1/instances/{instance_id}/ports/{port}/links": "create_port_link",
    "GET /v1/instances/{instance_id}/metrics": "get_instance_metrics",
    "GET /v1/instances/{instance_id}/events": "list_instance_events",
    "GET /v1/instances/{instance_id}/explain": "explain_instance",
    "POST /v1/instance-groups": "create_instance_group",
    "GET /v1/instance-groups": "list_instance_groups",
    "GET /v1/instance-groups/{group_id}": "get_instance_group",
    "DELETE /v1/instance-groups/{group_id}": "delete_instance_group",
    "POST /v1/instance-groups/{group_id}/stop": "stop_instance_group",
    "POST /v1/instance-groups/{group_id}/start": "start_instance_group",
    "POST /v1/reservations": "create_reservation",
    "GET /v1/reservations": "list_reservations",
    "GET /v1/reservations/{reservation_id}": "get_reservation",
    "PATCH /v1/reservations/{reservation_id}": "update_reservation",
    "DELETE /v1/reservations/{reservation_id}": "delete_reservation",
    "GET /v1/instance-groups/{group_id}/explain": "explain_instance_group",
    "GET /v1/queue": "get_queue",
    "GET /v1/cluster/fragmentation": "get_fragmentation",
    "GET /v1/nodes": "list_nodes",
    "GET /v1/nodes/{node_id}": "get_node",
    "PATCH /v1/nodes/{node_id}": "update_node",
    "POST /v1/nodes/{node_id}/cordon": "cordon_node",
    "POST /v1/nodes/{node_id}/uncordon": "uncordon_node",
    "POST /v1/nodes/{node_id}/drain": "drain_node",
    "POST /v1/nodes/{node_id}/approve": "approve_node",
    "DELETE /v1/nodes/{node_id}": "delete_node",
    "GET /v1/gpus": "list_gpus",
    "GET /v1/gpus/{uuid}": "get_gpu",
    "GET /v1/gpus/{uuid}/metrics": "get_gpu_metrics",
    "GET /v1/gpus/{uuid}/incidents": "list_gpu_incidents",
    "POST /v1/gpus/{uuid}/clear": "clear_gpu",
    "GET /v1/instance-types": "list_instance_types",
    "POST /v1/nodes/{node_id}/renew-credential": "renew_credential",
    "POST /v1/join-tokens": "create_join_token",
    "GET /v1/events": "list_events",
    "GET /v1/me": "get_me",
    "GET /v1/docker-context": "get_docker_context",
    "GET /v1/me/ssh": "get_my_ssh",
    "GET /v1/ssh-keys": "list_ssh_keys",
    "POST /v1/ssh-keys": "create_ssh_key",
    "GET /v1/ssh-keys/{key_id}": "get_ssh_key",
    "DELETE /v1/ssh-keys/{key_id}": "delete_ssh_key",
    "POST /v1/ssh-certificates": "create_ssh_certificate",
    "GET /v1/api-keys": "list_api_keys",
    "POST /v1/api-keys": "create_api_key",
    "GET /v1/api-keys/{key_id}": "get_api_key",
    "DELETE /v1/api-keys/{key_id}": "delete_api_key",
    "GET /v1/projects": "list_projects",
    "POST /v1/projects": "create_project",
    "GET /v1/projects/{project_id}": "get_project",
    "PATCH /v1/projects/{project_id}": "update_project",
    "DELETE /v1/projects/{project_id}": "delete_project",
    "GET /v1/projects/{project_id}/members": "list_members",
    "PUT /v1/projects/{project_id}/members/{user_id}": "put_member",
    "DELETE /v1/projects/{project_id}/members/{user_id}": "delete_member",
    "GET /v1/users": "list_users",
    "POST /v1/users": "create_user",
    "GET /v1/users/{user_id}": "get_user",
    "PATCH /v1/users/{user_id}": "update_user",
    "DELETE /v1/users/{user_id}": "delete_user",
    "GET /v1/templates": "list_templates",
    "POST /v1/templates": "create_template",
    "GET /v1/templates/{template_id}": "get_template",
    "PUT /v1/templates/by-name/{name}": "apply_template",
    "POST /v1/templates/{template_id}/render": "render_template",
    "DELETE /v1/templates/{template_id}": "delete_template",
    "GET /v1/secrets": "list_secrets",
    "POST /v1/secrets": "create_secret",
    "GET /v1/secrets/{secret_id}": "get_secret",
    "PUT /v1/secrets/{secret_id}": "replace_secret",
    "DELETE /v1/secrets/{secret_id}": "delete_secret",
    "GET /v1/registries": "list_registries",
    "POST /v1/registries": "create_registry",
    "GET /v1/registries/{registry_id}": "get_registry",
    "PUT /v1/registries/{registry_id}": "replace_registry",
    "DELETE /v1/registries/{registry_id}": "delete_registry",
    "GET /v1/webhooks": "list_webhooks",
    "POST /v1/webhooks": "create_webhook",
    "GET /v1/webhooks/{webhook_id}": "get_webhook",
    "PATCH /v1/webhooks/{webhook_id}": "update_webhook",
    "DELETE /v1/webhooks/{webhook_id}": "delete_webhook",
    "PUT /v1/webhooks/by-name/{name}": "apply_webhook",
    "POST /v1/webhooks/{webhook_id}/rotate-secret": "rotate_webhook_secret",
    "POST /v1/webhooks/{webhook_id}/test": "test_webhook",
    "GET /v1/webhooks/{webhook_id}/deliveries": "list_webhook_deliveries",
    "POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}/replay": "replay_webhook_delivery",
    "GET /v1/audit-log": "list_audit_log",
    "GET /v1/audit-log/head": "get_audit_head",
    "GET /healthz": "get_health",
    "GET /readyz": "get_readiness",
    "GET /metrics": "get_metrics",
    "POST /agent/v1/join": "join_node",
    "POST /agent/v1/session": "open_node_session",
    "POST /agent/v1/credential": "renew_node_credential",
    "POST /agent/v1/sync": "sync_node",
    "POST /agent/v1/heartbeat": "heartbeat",
    "POST /agent/v1/instances/{instance_id}/start-secrets": "hand_out_start_secrets",
    "POST /agent/v1/stream-requests": "list_stream_requests",
    "GET /agent/v1/streams/{stream_id}": "bring_stream",
}
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    with (
        running(settings_for(f"sqlite:///{folder / 'mooring.db'}", folder)) as service,
        service.client as admin_client,
    ):
        yield admin_client


@pytest.fixture(scope="module")
def document(client: Client) -> dict[str, Any]:
    client.headers.pop("Authorization")
    return dict(client.get("/openapi.json").json())


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in item.keys() & METHODS:
            yield f"{method.upper()} {path}", item[method]


def _schema(document: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body, with the components that it refers to."""
    return {**content["schema"], "components": document["components"]}


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    validate(document)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_document_has_exactly_these_operations(document: dict[str, Any]) -> None:
    assert {name: operation["operationId"] for name, operation in _operations(document)} == ENDPOINTS


def test_no_request_fits_two_operations(document: dict[str, Any]) -> None:
    """Paths of one method differ in a part that both state, so routers need not prefer one of them."""
    names = [name.split("/") for name, _operation in _operations(document)]
    for number, parts in enumerate(names):
        for others in names[number + 1 :]:
            pairs = zip(parts, others, strict=False)
            differ = any(a != b and "{" not in a + b for a, b in pairs)
            assert differ or len(parts) != len(others), (parts, others)


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in document["tags"]}
    for name, operation in _operations(document):
        assert len(operation["tags"]) == 1, name
        assert operation["tags"][0] in tags, name
        assert len(operation["description"]) > 15, name
        assert operation["summary"], name
        for parameter in operation.get("parameters", ()):
            assert parameter["schema"], (name, parameter)


def _answer(document: dict[str, Any], operation: dict[str, Any], code: str) -> dict[str, Any]:
    """An answer of an operation; a reference to a shared answer is resolved."""
    answer: dict[str, Any] = operation["responses"][code]
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rsplit("/", 1)[-1]]
    return answer


def test_the_description_of_update_instance_names_every_field(document: dict[str, Any]) -> None:
    (description,) = (
        operation["description"]
        for name, operation in _operations(document)
        if operation["operationId"] == "update_instance"
    )
    fields = document["components"]["schemas"]["InstancePatch"]["properties"]
    assert [name for name in fields if name not in description] == []


def test_every_operation_lists_its_errors_as_problems(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        errors = {code: _answer(document, operation, code) for code in operation["responses"] if code >= "4"}
        for code, answer in errors.items():
            assert list(answer["content"]) == ["application/problem+json"], (name, code)
            schema = answer["content"]["application/problem+json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, (name, code)
            assert answer["description"], (name, code)
        assert {"400", "413", "431", "500"} <= errors.keys(), name
        if name not in {"GET /healthz", "GET /readyz"}:
            assert {"401", "403", "422", "429", "503"} <= errors.keys(), name
        if "{" in name and not name.startswith("POST /agent"):
            assert "404" in errors, name
        if "requestBody" in operation:
            assert "415" in errors, name
        assert any(code < "300" for code in operation["responses"]), name


def test_problems_have_the_members_that_are_sent(document: dict[str, Any]) -> None:
    problem = document["components"]["schemas"]["Problem"]
    assert set(problem["required"]) >= {
        "type",
        "title",
        "status",
        "detail",
        "code",
        "request_id",
        "retryable",
        "instance",
    }
    assert "errors" in problem["properties"]


def test_every_body_has_an_example_that_validates(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        answers = [answer for code, answer in operation["responses"].items() if code < "300"]
        for body in (operation.get("requestBody", {}), *answers):
            for media_type, content in body.get("content", {}).items():
                examples = list(_examples(document, content))
                assert examples, (name, media_type)
                for example in examples:
                    _require_valid(document, media_type, content, example)


def _examples(document: dict[str, Any], content: dict[str, Any]) -> Iterator[Any]:
    """Yield the examples of a body: its own, and those of its schema."""
    if "example" in content:
        yield content["example"]
    reference = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    yield from document["components"]["schemas"].get(reference, {}).get("examples", ())


def _require_valid(document: dict[str, Any], media_type: str, content: dict[str, Any], example: Any) -> None:
    """Raises if an example does not match the schema, or does not have the form of its media type."""
    if "schema" in content:
        Draft202012Validator(_schema(document, content)).validate(example)
    if media_type == "application/x-ndjson":
        for line in example.splitlines():
            json.loads(line)
    elif media_type == "text/event-stream":
        identifier, data, *rest = example.split("\n")
        assert (identifier[:4], data[:6], rest) == ("id: ", "data: ", ["", ""])
        json.loads(data[6:])
    elif media_type == "text/plain":
        assert example.endswith("\n")


def test_every_example_of_a_schema_validates(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        validator = Draft202012Validator(_schema(document, {"schema": schema}))
        for example in schema.get("examples", ()):
            assert not [error.message for error in validator.iter_errors(example)], name


def test_the_service_accepts_the_examples(client: Client, document: dict[str, Any]) -> None:
    with Client(str(client.base_url)) as admin:
        for example in document["components"]["schemas"]["InstanceCreate"]["examples"]:
            assert admin.post("/v1/instances", json=example).status_code == 201
            assert admin.post("/v1/instances?dry_run=true", json=example).status_code == 200
        for example in document["components"]["schemas"]["JoinTokenCreate"]["examples"]:
            assert admin.post("/v1/join-tokens", json=example).status_code == 201


def test_answers_conform_to_the_document(client: Client, document: dict[str, Any]) -> None:
    with Client(str(client.base_url)) as admin:
        created = admin.create(gpus={"count": 64}, ports=[{"container": 80}])
        for path, template in {
            "/v1/instances": "/v1/instances",
            f"/v1/instances/{created['id']}": "/v1/instances/{instance_id}",
            f"/v1/instances/{created['id']}/explain": "/v1/instances/{instance_id}/explain",
            f"/v1/instances/{created['id']}/events": "/v1/instances/{instance_id}/events",
            f"/v1/instances/{created['id']}/metrics": "/v1/instances/{instance_id}/metrics",
            f"/v1/instances/{created['id']}/wait?state=pending": "/v1/instances/{instance_id}/wait",
            "/v1/nodes": "/v1/nodes",
            "/v1/gpus": "/v1/gpus",
            "/v1/instance-types": "/v1/instance-types",
            "/v1/events": "/v1/events",
            "/healthz": "/healthz",
        }.items():
            answer = admin.get(path)
            content = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]
            Draft202012Validator(_schema(document, content)).validate(answer.json())
        missing = admin.get("/v1/instances/none")
        problem = _answer(document, document["paths"]["/v1/instances/{instance_id}"]["get"], "404")["content"]
        Draft202012Validator(_schema(document, problem["application/problem+json"])).validate(missing.json())


def test_operations_declare_their_kind_of_credentials(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    assert {name: scheme["scheme"] for name, scheme in schemes.items()} == {
        "ApiKey": "bearer",
        "NodeCredential": "bearer",
    }
    for name, operation in _operations(document):
        schemes_of_operation = [scheme for entry in operation.get("security", ()) for scheme in entry]
        if name in {"GET /healthz", "GET /readyz", "POST /agent/v1/join"}:
            assert schemes_of_operation == [], name
        else:
            assert schemes_of_operation == ["NodeCredential" if "/agent/v1" in name else "ApiKey"], name


def test_headers_of_errors_are_declared(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        for code in operation["responses"]:
            headers = _answer(document, operation, code)["headers"]
            assert {"X-Request-Id", "RateLimit", "RateLimit-Policy"} <= headers.keys(), (name, code)
            assert ("Retry-After" in headers) == (code in {"429", "503"}), (name, code)
            assert ("WWW-Authenticate" in headers) == (code == "401"), (name, code)


def test_answers_link_to_the_operations_on_their_resources(document: dict[str, Any]) -> None:
    of_create = document["paths"]["/v1/instances"]["post"]["responses"]["201"]["links"]
    of_list = document["paths"]["/v1/gpus"]["get"]["responses"]["200"]["links"]
    assert of_create["stop_instance"]["parameters"] == {"instance_id": "$response.body#/id"}
    assert {"get_instance", "delete_instance", "wait_for_instance", "exec_in_instance"} <= of_create.keys()
    assert of_list["get_gpu"]["parameters"] == {"uuid": "$response.body#/items/0/uuid"}


def _values(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of single values anywhere in the document."""
    if isinstance(schema, list):
        for part in schema:
            yield from _values(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for key, part in schema.items():
            if key not in {"example", "examples", "default"}:
                yield from _values(part)


def test_every_value_has_a_limit(document: dict[str, Any]) -> None:
    for schema in _values([document["components"]["schemas"], document["paths"]]):
        if "enum" in schema or "const" in schema:
            continue
        if schema["type"] == "integer":
            assert ("minimum" in schema) != ("exclusiveMinimum" in schema), schema
            assert ("maximum" in schema) != ("exclusiveMaximum" in schema), schema
            assert schema["format"] in {"int32", "int64"}, schema
        elif schema["type"] == "string":
            assert schema["maxLength"] > 0, schema
        elif schema["type"] == "array":
            assert schema["maxItems"] > 0, schema


def test_no_parameter_may_be_null(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        for parameter in operation.get("parameters", ()):
            assert "anyOf" not in parameter["schema"], (name, parameter)


def test_schema_names_are_in_pascal_case(document: dict[str, Any]) -> None:
    for name in document["components"]["schemas"]:
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name), name


class _References(HTMLParser):
    """The URLs that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in {"src", "href"} and value]


def test_the_docs_page_loads_only_own_assets(client: Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    references = _References()
    references.feed(page.text)
    assert len(references.found) >= 3
    assert "://" not in page.text
    start = client.get("/docs/assets/start.js").text
    assert "'/openapi.json'" in start
    assert "persistAuthorization" not in start, "the key would stay in the browser's storage"
    # An injected script could read the key that a user types into the page.
    assert "script-src 'self';" in page.headers["content-security-policy"]
    assert not re.search(r"<script(?! src=)", page.text)
    for address in references.found:
        assert address.startswith("/docs/assets/")
        asset = client.get(address)
        assert asset.status_code == 200
        assert len(asset.content) > 200
    stylesheet = client.get("/docs/assets/swagger-ui.css").text
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", stylesheet)
