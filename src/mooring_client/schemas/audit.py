"""Schemas of the audit log."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer, Timestamp


class Actor(Answer):
    kind: Literal["key", "user", "join_token", "node", "system"]
    id: str
    name: str
    user_id: str | None


class AuditLink(Answer):
    chain: Annotated[str, Field(description="the project id, or `service` for entries of no project")]
    position: Annotated[int, Field(ge=1)]
    hash: Annotated[str, Field(description="signature over previous link, position and the entry's hash")]


class AuditHead(Answer):
    number: Annotated[int, Field(ge=1)]
    links: Annotated[int, Field(ge=0, description="number of links that the head covers")]
    hash: Annotated[str, Field(description="signature over the previous head and all links since")]
    at: Timestamp


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
    before: Annotated[dict[str, Any] | None, Field(description="old values of the changed fields")]
    after: Annotated[dict[str, Any] | None, Field(description="new values of the changed fields")]
    previous_hash: Annotated[str, Field(description="set only in entries of older releases")]
    hash: Annotated[
        str,
        Field(
            description="`hmac:<key id>:<HMAC-SHA256 in hex>` over `row`, a newline, and the fields from id "
            "to after as JSON in UTF-8 with sorted keys and no spaces. Only the server's key can make or "
            "verify it. In entries of older releases: SHA-256, in hex, over previous_hash, a newline, and "
            "that JSON"
        ),
    ]
    link: Annotated[AuditLink | None, Field(description="link in the project's chain; null: not linked yet")]


class AuditLog(Answer):
    items: list[AuditEntry]
    next_cursor: str | None
