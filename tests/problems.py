"""Checks of error answers."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

DOCUMENT = Path(__file__).parents[1] / "docs" / "openapi.json"
MEMBERS = {"type", "title", "status", "detail", "instance", "code", "request_id", "retryable"}


def problem(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The problem document of an answer. Raises AssertionError if the answer has another status or code."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document.keys() >= MEMBERS
    assert document["status"] == status
    assert document["type"] == f"urn:mooring:error:{document['code']}"
    assert document["request_id"] == answer.headers["x-request-id"]
    assert document["instance"] == unquote(answer.request.url.raw_path.partition(b"?")[0].decode())
    if code is not None:
        assert document["code"] == code, document
    return document


def require_declared(answer: httpx.Response) -> None:
    """Raises AssertionError if the operation does not declare the problem's code for this status."""
    if answer.headers.get("content-type") != "application/problem+json":
        return
    request, code = answer.request, answer.json()["code"]
    for path, declared in _declared_codes():
        if request.method.lower() in declared and path.fullmatch(request.url.path):
            codes = declared[request.method.lower()].get(str(answer.status_code), set())
            assert code in codes, f"{request.method} {path.pattern} does not declare {code}: {sorted(codes)}"
            return


@cache
def _declared_codes() -> list[tuple[re.Pattern[str], dict[str, dict[str, set[str]]]]]:
    """The declared codes by path, method and status; literal paths first."""
    document = json.loads(DOCUMENT.read_text())

    def codes(answer: dict[str, Any]) -> set[str]:
        if "$ref" in answer:
            answer = document["components"]["responses"][answer["$ref"].rsplit("/", 1)[1]]
        content: dict[str, Any] = answer.get("content", {}).get("application/problem+json", {})
        return set(content.get("examples", ()))

    return [
        (
            re.compile(re.sub(r"{[^}]*}", "[^/]+", path)),
            {
                method: {status: codes(answer) for status, answer in operation["responses"].items()}
                for method, operation in operations.items()
            },
        )
        for path, operations in sorted(document["paths"].items(), key=lambda item: item[0].count("{"))
    ]
