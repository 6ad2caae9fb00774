"""API keys, and who a caller is, on the wire."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mooring.core.access import Role
from mooring.core.text import Text
from mooring.schemas.base import Answer, Body, Moment, Timestamp
from mooring.schemas.projects import DisplayName, User

Scope = Literal["instances:read", "instances:write", "instances:exec", "usage:read", "metrics:read", "admin"]


class ApiKeyCreate(Body):
    """A new key. `role`, `scopes` or both: scopes narrow a role; without a role they are all it may do."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ci", "role": "member"}]})

    name: DisplayName
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your own project")] = None
    user_id: Annotated[
        Text | None,
        Field(max_length=64, description="whose key: it can do no more than they can; null: a service's"),
    ] = None
    role: Annotated[Role | None, Field(strict=False)] = None
    scopes: Annotated[list[Scope], Field(max_length=6)] = []
    expires_at: Annotated[Moment | None, Field(description="RFC 3339 with a zone; null: never")] = None


class ApiKey(Answer):
    id: str
    name: str
    prefix: Annotated[str, Field(description="the key's first characters, to tell yours apart")]
    project_id: str | None
    user_id: str | None
    role: Role | None
    scopes: list[Scope]
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Annotated[Timestamp | None, Field(description="to the minute")]


class NewApiKey(ApiKey):
    key: Annotated[str, Field(description="shown this once")]


class ApiKeyList(Answer):
    items: list[ApiKey]
    next_cursor: str | None


class MyProject(Answer):
    id: str
    name: str
    role: Role | None
    scopes: list[Scope]


class Me(Answer):
    """Who you are to this service, and what you may do."""

    kind: Literal["key", "user"]
    key: ApiKey | None
    user: User | None
    project: Annotated[MyProject | None, Field(description="the one project of the key")]
    role: Role | None
    scopes: Annotated[list[Scope], Field(description="in that project; of an admin: everywhere")]
    is_admin: bool
    projects: Annotated[list[MyProject], Field(description="all that you are in; of an admin: none listed")]
