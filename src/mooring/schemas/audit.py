"""The audit log on the wire."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mooring.schemas.base import Answer, Timestamp


class Actor(Answer):
    kind: Literal["key", "user", "join_token", "node", "system"]
    id: str
    name: str
    user_id: str | None


class AuditLink(Answer):
    chain: Annotated[str, Field(description="the project's id, or `service` for what belongs to none")]
    position: Annotated[int, Field(ge=1)]
    hash: Annotated[
        str,
        Field(description="signed like the row's: over the link before it, its place, and the row's hash"),
    ]


class AuditHead(Answer):
    number: Annotated[int, Field(ge=1)]
    links: Annotated[int, Field(ge=0, description="how many links of all chains it covers")]
    hash: Annotated[str, Field(description="signed: over the head before it and all links since")]
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
    before: Annotated[dict[str, Any] | None, Field(description="the fields that changed, as they were")]
    after: Annotated[dict[str, Any] | None, Field(description="and as they are")]
    previous_hash: Annotated[str, Field(description="of rows that older releases wrote; else empty")]
    hash: Annotated[
        str,
        Field(
            description="`hmac:<key id>:<HMAC-SHA256 in hex>` over `row`, a newline, and the fields from id "
            "to after as JSON in UTF-8 with sorted keys and no spaces; only who has the server's key can "
            "make or verify it. Of rows that older releases wrote: SHA-256, in hex, over previous_hash, a "
            "newline, and that JSON"
        ),
    ]
    link: Annotated[
        AuditLink | None,
        Field(description="its place in its project's chain; null for a moment after it came"),
    ]


class AuditLog(Answer):
    items: list[AuditEntry]
    next_cursor: str | None
