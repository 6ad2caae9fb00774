"""Schemas of registry credentials. Answers never contain passwords."""

from typing import Annotated

from pydantic import ConfigDict, Field

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.text import Text

# A host with a dot or a port, or localhost, as in image names. Servers copied from `docker login` may have a
# scheme and the path of Docker Hub's API; any other path would be only a part of a registry.
RegistryServer = Annotated[
    Text,
    Field(
        max_length=255,
        pattern=(
            r"^(https?://)?([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:[0-9]{1,5})?|[A-Za-z0-9-]+:[0-9]{1,5}|localhost)"
            r"(/(v[12]/?)?)?$"
        ),
        description="host[:port], as in image names; Docker Hub is `docker.io`",
    ),
]
Username = Annotated[Text, Field(min_length=1, max_length=255)]
Password = Annotated[Text, Field(min_length=1, repr=False, description="a password or token; write-only")]


class RegistryCreate(Body):
    """New credentials for pulling the project's images."""

    model_config = ConfigDict(hide_input_in_errors=True)

    server: RegistryServer
    username: Username
    password: Password
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None


class RegistryPut(Body):
    model_config = ConfigDict(hide_input_in_errors=True)

    password: Password


class Registry(Answer):
    id: str
    server: Annotated[str, Field(description="the canonical name: docker.io for index.docker.io")]
    username: str
    project_id: str
    created_at: Timestamp


class RegistryList(Answer):
    items: list[Registry]
    next_cursor: str | None
