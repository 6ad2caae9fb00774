"""Schemas of secrets. Answers never contain values."""

from typing import Annotated

from pydantic import ConfigDict, Field

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.text import EnvValue, SecretName, Text

# Models with a value show it neither in their repr nor in validation errors.
SecretValue = Annotated[EnvValue, Field(min_length=1, repr=False, description="write-only")]


class SecretCreate(Body):
    """A new secret. Instances name it in `env`: `{"TOKEN": {"secret": "<name>"}}`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: SecretName
    value: SecretValue
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None


class SecretPut(Body):
    model_config = ConfigDict(hide_input_in_errors=True)

    value: SecretValue


class Secret(Answer):
    id: str
    name: str
    project_id: str
    created_at: Timestamp


class SecretList(Answer):
    items: list[Secret]
    next_cursor: str | None
