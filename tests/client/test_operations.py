"""Every operation of the API is exactly one method of the SDK, with the same parameters."""

import ast
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooring_client import OPERATIONS as METHODS_BY_OPERATION
from mooring_client import AsyncMooring, Mooring
from mooring_client.fields import InstanceFields, ProjectFields, TemplateFields

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "mooring_client" / "aio").rglob("*.py"))
DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs" / "openapi.json").read_text())
METHODS = {"get", "post", "put", "patch", "delete"}
# Parameters with another name in Python: `from` is a keyword.
RENAMED = {"from": "from_at", "to": "to_at"}
# What paging and following do by themselves.
FIELDS: dict[str, Any] = {
    f"Unpack[{each.__name__}]": each for each in (InstanceFields, ProjectFields, TemplateFields)
}
IMPLIED = {"cursor", "dry_run", "follow"}
# Of a create: `instances.wait` waits without a limit of time, and through restarts of the server.
WAITED = {"wait", "timeout_s"}


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    parameters: frozenset[str]
    answers: frozenset[str]  # names of the models; empty: no JSON
    has_dry_run: bool


@dataclass(frozen=True)
class Method:
    """A function of the SDK with a `Call`."""

    where: str
    method: str
    path: str
    parameters: frozenset[str]
    answer: str


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(DOCUMENT["components"]["schemas"][name]) if name else schema


def _operations() -> dict[str, Operation]:
    found = {}
    for path, item in DOCUMENT["paths"].items():
        for method in item.keys() & METHODS:
            if not path.startswith("/agent/"):
                operation = item[method]
                found[operation["operationId"]] = Operation(
                    method.upper(),
                    _without_names(path),
                    _parameters_of(operation),
                    _answers_of(operation),
                    any(each["name"] == "dry_run" for each in operation.get("parameters", ())),
                )
    return found


def _without_names(path: str) -> str:
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))


def _parameters_of(operation: dict[str, Any]) -> frozenset[str]:
    names = {each["name"] for each in operation.get("parameters", ()) if each["in"] != "header"}
    if any(each["name"] == "if-match" for each in operation.get("parameters", ())):
        names.add("version")
    for content in operation.get("requestBody", {}).get("content", {}).values():
        names |= _resolved(content["schema"])["properties"].keys()
    if operation["operationId"] == "create_instance":
        names -= WAITED
    return frozenset(RENAMED.get(name, name) for name in names - IMPLIED)


def _answers_of(operation: dict[str, Any]) -> frozenset[str]:
    contents = [
        answer["content"]["application/json"]
        for status, answer in operation["responses"].items()
        if status.startswith("2") and "application/json" in answer.get("content", {})
    ]
    schemas = [part for content in contents for part in content["schema"].get("anyOf", [content["schema"]])]
    return frozenset(schema["$ref"].rpartition("/")[2] for schema in schemas)


def _methods() -> dict[str, list[Method]]:
    found: dict[str, list[Method]] = {}
    for source in SOURCES:
        for function in ast.walk(ast.parse(source.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Call":
                        fields = {each.arg: each.value for each in node.keywords}
                        if not (operation := ast.literal_eval(fields["operation"])):
                            continue  # `client.request`, which sends any request
                        found.setdefault(operation, []).append(_method(source, function, fields))
    return found


def _method(
    source: Path, function: ast.FunctionDef | ast.AsyncFunctionDef, fields: dict[str | None, ast.expr]
) -> Method:
    path = fields["path"]
    template = path.args[0] if isinstance(path, ast.Call) else path
    names = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    if function.args.kwarg is not None:
        names |= FIELDS[ast.unparse(function.args.kwarg.annotation or path)].__annotations__.keys()
    return Method(
        f"{source.stem}.{function.name}",
        ast.literal_eval(fields["method"]),
        ast.literal_eval(template),
        frozenset(names - {"self", "transport"} - IMPLIED),
        ast.unparse(fields["read"]),
    )


OPERATIONS, CALLS = _operations(), _methods()


def test_every_operation_has_a_method_and_no_method_has_another() -> None:
    assert len(OPERATIONS) > 80
    assert CALLS.keys() == OPERATIONS.keys()


def test_an_operation_has_exactly_one_method() -> None:
    # A dry run has an answer of its own.
    with_dry_run = {name for name, operation in OPERATIONS.items() if operation.has_dry_run}
    assert {name: len(methods) for name, methods in CALLS.items() if len(methods) > 1} == dict.fromkeys(
        with_dry_run, 2
    )
    names = Counter(method.where for methods in CALLS.values() for method in methods)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_method_has_the_parameters_of_the_operation(name: str) -> None:
    operation = OPERATIONS[name]
    for method in CALLS[name]:
        assert (method.method, method.path) == (operation.method, operation.path), method.where
        assert method.parameters == operation.parameters, method.where
        if operation.answers:
            assert method.answer in {f"model({answer})" for answer in operation.answers}, method.where
        else:
            assert method.answer in {"nothing", "text", "answers.nothing"}, method.where


def test_the_method_of_each_operation_can_be_looked_up() -> None:
    assert METHODS_BY_OPERATION.keys() == OPERATIONS.keys()
    for kind in (Mooring, AsyncMooring):
        client = kind("http://127.0.0.1:9", "a-key")
        for name in METHODS_BY_OPERATION.values():
            resource, _, method = name.partition(".")
            assert callable(getattr(getattr(client, resource), method)), name
