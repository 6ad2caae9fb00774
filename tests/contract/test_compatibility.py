"""The comparison of documents finds each kind of breaking change and accepts compatible changes."""

from copy import deepcopy
from typing import Any

import pytest

from tests.contract.compatibility import breaks, differences

OWNER: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def _pet(name: str, *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string", "maxLength": 30},
            "kind": {"type": "string", "enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "owner": {"anyOf": [{"$ref": f"#/components/schemas/{name}Owner"}, {"type": "null"}]},
            "tags": {"type": "array", "maxItems": 5, "items": {"type": "string", "maxLength": 9}},
            "parent": {"$ref": f"#/components/schemas/{name}"},
        },
        "required": list(required),
    }


DOCUMENT: dict[str, Any] = {
    "paths": {
        "/pets": {
            "post": {
                "operationId": "create_pet",
                "security": [{"Key": []}],
                "parameters": [
                    {"in": "query", "name": "dry", "required": False, "schema": {"type": "boolean"}},
                ],
                "requestBody": {
                    "required": False,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/PetCreate"}}},
                },
                "responses": {
                    "201": {
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}}
                    },
                    "404": {"$ref": "#/components/responses/Missing"},
                },
            },
            "get": {"operationId": "list_pets", "responses": {"200": {"content": {"text/plain": {}}}}},
        },
    },
    "components": {
        "responses": {"Missing": {"content": {"application/problem+json": {"schema": {"type": "object"}}}}},
        "schemas": {
            "PetOwner": OWNER,
            "PetCreateOwner": deepcopy(OWNER),
            "Pet": _pet("Pet", "id", "kind"),
            "PetCreate": _pet("PetCreate", "kind"),
        },
    },
}
POST = "paths//pets/post"
ANSWER = "components/schemas/Pet"
REQUEST = "components/schemas/PetCreate"
REMOVED = object()


def _changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The document with values set or removed at slash-separated paths.

    `//` is a separator before a key that begins with a slash, and `|` is a slash within a key.
    """
    made = deepcopy(DOCUMENT)
    for path, value in changes:
        place: Any = made
        *parents, last = [part.replace("|", "/") for part in path.replace("//", "/|").split("/")]
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        key = int(last) if isinstance(place, list) else last
        if value is REMOVED:
            del place[key]
        else:
            place[key] = value
    return made


BREAKS: dict[str, tuple[tuple[str, Any], str]] = {
    "operation removed": (("paths//pets/get", REMOVED), "GET /pets: the operation is gone"),
    "operation renamed": ((f"{POST}/operationId", "make_pet"), "operationId"),
    "other credentials": ((f"{POST}/security", [{"Other": []}]), "no longer enough"),
    "credentials where none were": (("paths//pets/get/security", [{"Key": []}]), "no longer enough"),
    "status removed": ((f"{POST}/responses/404", REMOVED), "status 404 is gone"),
    "another media type": (
        ("paths//pets/get/responses/200/content", {"text/html": {}}),
        "200 is no longer text/plain",
    ),
    "answer field removed": ((f"{ANSWER}/properties/age", REMOVED), "201/age is gone"),
    "answer field retyped": ((f"{ANSWER}/properties/id", {"type": "integer"}), "201/id may now be integer"),
    "answer field of another format": (
        (f"{ANSWER}/properties/id", {"type": "string", "format": "uuid"}),
        "201/id had the format None, has uuid",
    ),
    "answer field may be null": (
        (f"{ANSWER}/properties/kind", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        "201/kind may now be null",
    ),
    "answer field may be absent": ((f"{ANSWER}/required", ["id"]), "201/kind may be left out"),
    "field of an answer's part removed": (
        ("components/schemas/PetOwner", {"type": "object", "properties": {}}),
        "201/owner/name is gone",
    ),
    "list's element retyped": ((f"{ANSWER}/properties/tags/items", {"type": "integer"}), "201/tags/*"),
    "shared answer retyped": (
        ("components/responses/Missing/content/application|problem+json/schema", {"type": "string"}),
        "404 may now be string",
    ),
    "new required request field": (
        (f"{REQUEST}/required", ["kind", "age"]),
        "request/age is required",
    ),
    "request field removed": ((f"{REQUEST}/properties/age", REMOVED), "request/age is gone"),
    "request field retyped": ((f"{REQUEST}/properties/age", {"type": "string"}), "no longer be integer"),
    "request field no longer null": (
        (f"{REQUEST}/properties/owner", {"$ref": "#/components/schemas/PetCreateOwner"}),
        "request/owner may no longer be null",
    ),
    "request enum value removed": ((f"{REQUEST}/properties/kind/enum", ["cat"]), "no longer takes 'dog'"),
    "request field becomes an enum": (
        (f"{REQUEST}/properties/id", {"type": "string", "enum": ["a"]}),
        "takes only ['a'] now",
    ),
    "maximum lowered": ((f"{REQUEST}/properties/age/maximum", 98), "maximum 99, has 98"),
    "minimum raised": ((f"{REQUEST}/properties/age/minimum", 1), "minimum 0, has 1"),
    "length lowered": ((f"{REQUEST}/properties/id/maxLength", 29), "maxLength 30, has 29"),
    "items lowered": ((f"{REQUEST}/properties/tags/maxItems", 4), "maxItems 5, has 4"),
    "limit where none was": ((f"{REQUEST}/properties/id/minLength", 1), "minLength None, has 1"),
    "limit of an element": ((f"{REQUEST}/properties/tags/items/maxLength", 8), "request/tags/*"),
    "new pattern": ((f"{REQUEST}/properties/id/pattern", "^a"), "pattern None, has ^a"),
    "unknown fields refused": ((f"{REQUEST}/additionalProperties", False), "takes no other fields"),
    "body required": ((f"{POST}/requestBody/required", True), "body is required"),
    "body of another media type": (
        (f"{POST}/requestBody/content", {"text/csv": {}}),
        "no longer be application/json",
    ),
    "parameter removed": ((f"{POST}/parameters", []), "query parameter dry is gone"),
    "parameter required": ((f"{POST}/parameters/0/required", True), "query parameter dry is required"),
    "parameter retyped": ((f"{POST}/parameters/0/schema", {"type": "integer"}), "no longer be boolean"),
    "new required parameter": (
        (
            f"{POST}/parameters",
            [
                *DOCUMENT["paths"]["/pets"]["post"]["parameters"],
                {"in": "header", "name": "X", "required": True, "schema": {"type": "string"}},
            ],
        ),
        "header parameter X is required",
    ),
}
COMPATIBLE: dict[str, tuple[str, Any]] = {
    "version of OpenAPI": ("openapi", "3.1.0"),
    "operation": ("paths//toys", {"get": {"operationId": "list_toys", "responses": {"200": {}}}}),
    "status": (f"{POST}/responses/409", {"description": "conflict"}),
    "answer field": (f"{ANSWER}/properties/colour", {"type": "string"}),
    "answer field always there": (f"{ANSWER}/required", ["id", "kind", "age"]),
    "answer enum value": (f"{ANSWER}/properties/kind/enum", ["cat", "dog", "fish"]),
    "answer no longer null": (f"{ANSWER}/properties/owner", {"$ref": "#/components/schemas/PetOwner"}),
    "answer limit narrowed": (f"{ANSWER}/properties/id/maxLength", 20),
    "optional request field": (f"{REQUEST}/properties/colour", {"type": "string"}),
    "request field no longer required": (f"{REQUEST}/required", []),
    "request enum value": (f"{REQUEST}/properties/kind/enum", ["cat", "dog", "fish"]),
    "request limit widened": (f"{REQUEST}/properties/age/maximum", 100),
    "request limit taken away": (f"{REQUEST}/properties/age", {"type": "integer"}),
    "request field may be null": (
        f"{REQUEST}/properties/id",
        {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
    ),
    "request takes another type": (
        f"{REQUEST}/properties/id",
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 30}]},
    ),
    "request takes fractions": (f"{REQUEST}/properties/age", {"type": "number", "minimum": 0, "maximum": 99}),
    "other credentials too": (f"{POST}/security", [{"Key": []}, {"Other": []}]),
    "optional parameter": (
        f"{POST}/parameters/0",
        {"in": "query", "name": "dry", "required": False, "schema": {"type": ["boolean", "string"]}},
    ),
    "description": (f"{POST}/description", "makes a pet"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_breaking_change_is_found_and_nothing_else(name: str) -> None:
    change, expected = BREAKS[name]
    (found,) = breaks(DOCUMENT, _changed(change))
    assert expected in found


@pytest.mark.parametrize("name", COMPATIBLE)
def test_a_compatible_change_is_accepted(name: str) -> None:
    assert breaks(DOCUMENT, _changed(COMPATIBLE[name])) == []


def test_differences_other_than_texts_are_listed() -> None:
    assert differences(DOCUMENT, _changed((f"{POST}/description", "makes a pet"))) == []
    assert differences(DOCUMENT, _changed((f"{ANSWER}/examples", [{"id": "1", "kind": "cat"}]))) == []
    path = "components/schemas/PetOwner/properties/name/maxLength"
    assert differences(DOCUMENT, _changed((path, 9))) == [f"/{path} is new"]
    path = f"{POST}/responses/404"
    assert differences(DOCUMENT, _changed((path, REMOVED))) == [f"/{path} is gone"]
