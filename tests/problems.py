"""What every error answer must look like."""

from typing import Any
from urllib.parse import unquote

import httpx

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "request_id", "retryable"}


def problem(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The problem document of an answer that must be one."""
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
