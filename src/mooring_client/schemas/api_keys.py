"""Schemas of API keys and of the caller's identity."""

from typing import Annotated, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer, Body, RequestTime, Timestamp
from mooring_client.schemas.projects import DisplayName, Role, User
from mooring_client.schemas.text import Text

Scope = Literal["instances:read", "instances:write", "instances:exec", "usage:read", "metrics:read", "admin"]


class ApiKeyCreate(Body):
    """A new key with a role, scopes or both. A key with both may do only what both allow."""

    name: DisplayName
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
    user_id: Annotated[Text | None, Field(max_length=64, description="the key's user; null: none")] = None
    role: Annotated[Role | None, Field(strict=False)] = None
    scopes: Annotated[list[Scope], Field(max_length=6)] = []
    expires_at: Annotated[RequestTime | None, Field(description="RFC 3339 with a zone; null: never")] = None


class ApiKey(Answer):
    id: str
    name: str
    prefix: Annotated[str, Field(description="the first characters of the key")]
    project_id: str | None
    user_id: str | None
    role: Role | None
    scopes: list[Scope]
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Annotated[Timestamp | None, Field(description="rounded to the minute; null: never")]


class NewApiKey(ApiKey):
    key: Annotated[str, Field(description="the key, shown only once")]


class ApiKeyList(Answer):
    items: list[ApiKey]
    next_cursor: str | None


class MyProject(Answer):
    id: str
    name: str
    role: Role | None
    scopes: list[Scope]


class Me(Answer):
    """The caller's identity and permissions."""

    kind: Literal["key", "user"]
    key: ApiKey | None
    user: User | None
    project: Annotated[MyProject | None, Field(description="the project of the key; null: none")]
    role: Role | None
    scopes: Annotated[list[Scope], Field(description="in `project`; without a project: in all projects")]
    is_admin: bool
    projects: Annotated[list[MyProject], Field(description="your projects; empty for admins")]
