"""Finds changes between two OpenAPI documents that break clients of the older one.

Compatible additions: operations, optional fields and parameters of requests, fields and enum values of
answers, statuses, wider limits of requests. Clients ignore unknown fields (schemas/base.py).

The maintained tools for this are Go programs, which neither npm nor pip installs. This module supports only
the JSON Schema that FastAPI and pydantic generate.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_TEXTS = ("description", "summary", "title", "example", "examples")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")


def breaks(old: Schema, new: Schema) -> list[str]:
    """A text for each breaking change; empty if every client of `old` works with `new`."""
    return list(dict.fromkeys(_Comparison(old, new).operations()))


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """All differences but texts and examples, by path. Shared answers are inlined before the comparison."""
    if not path:
        old, new = _inlined(old), _inlined(new)
    if isinstance(old, dict) and isinstance(new, dict):
        texts = () if path.endswith("/properties") else _TEXTS
        names = sorted((old.keys() | new.keys()).difference(texts))
        return [
            found
            for name in names
            for found in (
                differences(old[name], new[name], f"{path}/{name}")
                if name in old and name in new
                else [f"{path}/{name} is {'gone' if name in old else 'new'}"]
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [found for at, (was, now) in pairs for found in differences(was, now, f"{path}/{at}")]
    return [] if old == new else [f"{path} was {old}, is {new}"]


def _inlined(document: Schema) -> Schema:
    made = deepcopy(document)
    for _name, operation in _operations(made):
        answers = operation["responses"]
        operation["responses"] = {status: _resolved(made, answer) for status, answer in answers.items()}
    for shared in ("responses", "examples"):
        made["components"].pop(shared, None)
    return made


@dataclass(frozen=True)
class _Comparison:
    old: Schema
    new: Schema

    def operations(self) -> Iterator[str]:
        later = dict(_operations(self.new))
        for name, before in _operations(self.old):
            if name not in later:
                yield f"{name}: the operation is gone"
                continue
            for found in self._operation(before, later[name]):
                yield f"{name}: {found}"

    def _operation(self, before: Schema, after: Schema) -> Iterator[str]:
        if before.get("operationId") != after.get("operationId"):
            yield f"operationId was {before.get('operationId')!r}, is {after.get('operationId')!r}"
        yield from self._credentials(before, after)
        yield from self._parameters(before, after)
        yield from self._body(before.get("requestBody"), after.get("requestBody"))
        yield from self._answers(before, after)

    def _credentials(self, before: Schema, after: Schema) -> Iterator[str]:
        alternatives = after.get("security", [])
        for given in before.get("security", []) or [{}]:
            if alternatives and not any(required.keys() <= given.keys() for required in alternatives):
                yield f"the credentials {sorted(given) or 'none'} are no longer enough"

    def _parameters(self, before: Schema, after: Schema) -> Iterator[str]:
        earlier, later = self._by_name(self.old, before), self._by_name(self.new, after)
        for name, parameter in later.items():
            if parameter.get("required") and not earlier.get(name, {}).get("required"):
                yield f"{name} is required"
        for name, parameter in earlier.items():
            if name not in later:
                yield f"{name} is gone"
            else:
                yield from self._request(parameter["schema"], later[name]["schema"], name)

    @staticmethod
    def _by_name(document: Schema, operation: Schema) -> dict[str, Schema]:
        found = (_resolved(document, parameter) for parameter in operation.get("parameters", ()))
        return {f"{parameter['in']} parameter {parameter['name']}": parameter for parameter in found}

    def _body(self, before: Schema | None, after: Schema | None) -> Iterator[str]:
        before, after = before or {}, after or {}
        if after.get("required") and not before.get("required"):
            yield "the request's body is required"
        for kind, content in before.get("content", {}).items():
            if kind not in after.get("content", {}):
                yield f"the request's body can no longer be {kind}"
            else:
                later = after["content"][kind].get("schema", {})
                yield from self._request(content.get("schema", {}), later, "request")

    def _answers(self, before: Schema, after: Schema) -> Iterator[str]:
        for status, answer in before["responses"].items():
            if status not in after["responses"]:
                yield f"status {status} is gone"
                continue
            earlier = _resolved(self.old, answer).get("content", {})
            later = _resolved(self.new, after["responses"][status]).get("content", {})
            for kind, content in earlier.items():
                if kind not in later:
                    yield f"{status} is no longer {kind}"
                else:
                    schema = later[kind].get("schema", {})
                    yield from self._answer(content.get("schema", {}), schema, f"{status}")

    def _request(
        self, before: Schema, after: Schema, location: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Iterator[str]:
        """Every value that was accepted must still be accepted."""
        seen, is_known = _visited(before, after, seen)
        if is_known:
            return
        later = list(_branches(self.new, after))
        for branch in _branches(self.old, before):
            comparable = [other for other in later if _kind(other) in {_kind(branch), "any"}]
            # An integer is a number.
            comparable += [other for other in later if (_kind(branch), _kind(other)) == ("integer", "number")]
            if not comparable:
                yield f"{location} may no longer be {_kind(branch)}"
                continue
            yield from _best_fit(
                [list(self._request_branch(branch, other, location, seen)) for other in comparable]
            )

    def _request_branch(
        self, before: Schema, after: Schema, location: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[str]:
        yield from _fewer_values(before, after, location)
        yield from _narrower(before, after, location)
        yield from self._request_fields(before, after, location, seen)
        for key in ("items", "additionalProperties", "propertyNames"):
            earlier, later = before.get(key, True), after.get(key, True)
            if later is False and earlier is not False:
                yield f"{location} takes no other fields any more"
            elif isinstance(later, dict) and earlier is not False:
                yield from self._request({} if earlier is True else earlier, later, f"{location}/*", seen)

    def _request_fields(
        self, before: Schema, after: Schema, location: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[str]:
        for name in after.get("required", ()):
            if name not in before.get("required", ()):
                yield f"{location}/{name} is required"
        fields = after.get("properties", {})
        for name, field in before.get("properties", {}).items():
            if name in fields:
                yield from self._request(field, fields[name], f"{location}/{name}", seen)
            else:
                yield f"{location}/{name} is gone"

    def _answer(
        self, before: Schema, after: Schema, location: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Iterator[str]:
        """Every value that is sent must have been allowed before."""
        seen, is_known = _visited(before, after, seen)
        if is_known:
            return
        earlier = list(_branches(self.old, before))
        for branch in _branches(self.new, after):
            comparable = [other for other in earlier if _kind(other) in {_kind(branch), "any"}]
            comparable += [
                other for other in earlier if (_kind(other), _kind(branch)) == ("number", "integer")
            ]
            if not comparable:
                yield f"{location} may now be {_kind(branch)}"
                continue
            yield from _best_fit(
                [list(self._answer_branch(other, branch, location, seen)) for other in comparable]
            )

    def _answer_branch(
        self, before: Schema, after: Schema, location: str, seen: frozenset[tuple[str, str]]
    ) -> Iterator[str]:
        if before.get("format") != after.get("format") and before.get("type") == "string":
            yield f"{location} had the format {before.get('format')}, has {after.get('format')}"
        fields = after.get("properties", {})
        for name, field in before.get("properties", {}).items():
            if name not in fields:
                yield f"{location}/{name} is gone"
                continue
            if name in before.get("required", ()) and name not in after.get("required", ()):
                yield f"{location}/{name} may be left out"
            yield from self._answer(field, fields[name], f"{location}/{name}", seen)
        for key in ("items", "additionalProperties"):
            earlier, later = before.get(key), after.get(key)
            if isinstance(earlier, dict) and isinstance(later, dict):
                yield from self._answer(earlier, later, f"{location}/*", seen)


def _operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield f"{method.upper()} {path}", item[method]


def _resolved(document: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        place: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        schema = place
    return schema


def _branches(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, each of one type."""
    schema = _resolved(document, schema)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        for part in alternatives:
            yield from _branches(document, part)
    elif isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            yield {**schema, "type": kind}
    elif len(schema.get("allOf", ())) == 1:
        yield from _branches(document, schema["allOf"][0])
    else:
        yield schema


def _kind(schema: Schema) -> str:
    return str(schema.get("type", "any"))


def _visited(
    before: Schema, after: Schema, seen: frozenset[tuple[str, str]]
) -> tuple[frozenset[tuple[str, str]], bool]:
    """Add the pair to `seen`. Returns also whether it was there, as recursive schemas are followed once."""
    pair = (before.get("$ref", ""), after.get("$ref", ""))
    return (seen | {pair}, pair in seen) if all(pair) else (seen, False)


def _best_fit(findings: list[list[str]]) -> list[str]:
    """The findings of the alternative that has the fewest."""
    return min(findings, key=len)


def _values(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _fewer_values(before: Schema, after: Schema, location: str) -> Iterator[str]:
    earlier, later = _values(before), _values(after)
    if later is None:
        return
    if earlier is None:
        yield f"{location} takes only {later} now"
        return
    for value in earlier:
        if value not in later:
            yield f"{location} no longer takes {value!r}"


def _narrower(before: Schema, after: Schema, location: str) -> Iterator[str]:
    for key in (*_UPPER, *_LOWER):
        if key not in after:
            continue
        was, limit = before.get(key), after[key]
        if was is None or (limit < was if key in _UPPER else limit > was):
            yield f"{location} had the {key} {was}, has {limit}"
    for key in ("pattern", "format", "multipleOf", "uniqueItems"):
        # Each change is reported, as it is not decidable here whether a pattern accepts all that another did.
        if key in after and after[key] != before.get(key) and before.get("type") == after.get("type"):
            yield f"{location} had the {key} {before.get(key)}, has {after[key]}"
