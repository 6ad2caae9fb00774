"""Secrets on the wire: their values come in and never go out."""

from typing import Annotated

from pydantic import ConfigDict, Field

from mooring.core.text import EnvValue, SecretName, Text
from mooring.schemas.base import Answer, Body, Timestamp

# No model with a value shows it, neither when it is printed nor when something of it is wrong.
SecretValue = Annotated[EnvValue, Field(min_length=1, repr=False, description="write-only")]


class SecretCreate(Body):
    """A value that containers get as the variable that names it: `"env": {"TOKEN": {"secret": "<name>"}}`."""

    model_config = ConfigDict(
        hide_input_in_errors=True, json_schema_extra={"examples": [{"name": "hf-token", "value": "hf_…"}]}
    )

    name: SecretName
    value: SecretValue
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your own project")] = None


class SecretPut(Body):
    model_config = ConfigDict(hide_input_in_errors=True, json_schema_extra={"examples": [{"value": "hf_…"}]})

    value: SecretValue


class Secret(Answer):
    id: str
    name: str
    project_id: str
    created_at: Timestamp


class SecretList(Answer):
    items: list[Secret]
    next_cursor: str | None
