"""The audit log on the wire."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mooring.schemas.base import Answer, Timestamp


class Actor(Answer):
    kind: Literal["key", "user", "join_token", "node", "system"]
    id: str
    name: str
    user_id: str | None


class AuditEntry(Answer):
    id: str
    seq: int
    at: Timestamp
    actor: Actor
    address: str | None
    request_id: str | None
    action: str
    project_id: str | None
    target_id: str | None
    before: Annotated[dict[str, Any] | None, Field(description="the fields that changed, as they were")]
    after: Annotated[dict[str, Any] | None, Field(description="and as they are")]
    previous_hash: str
    hash: Annotated[
        str,
        Field(
            description="SHA-256, in hex, over previous_hash, a newline, and the other fields less seq, as "
            "JSON in UTF-8 with sorted keys and no spaces"
        ),
    ]


class AuditLog(Answer):
    items: list[AuditEntry]
    next_cursor: str | None
