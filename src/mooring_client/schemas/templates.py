"""Schemas of templates: named specs of instances with parameters."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError, to_json

from mooring_client.schemas.base import Answer, Body, Json, Timestamp
from mooring_client.schemas.text import NO_NUL, Name, Text

MAX_PARAMETERS: Final = 32
MAX_SPEC_BYTES: Final = 32 * 1024
# Lower case, so that a placeholder is not taken for a variable of a shell, such as ${HOME}.
ParameterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$", max_length=32)]
ParameterText = Annotated[str, StringConstraints(pattern=NO_NUL, max_length=4096)]
ParameterValue = bool | int | float | ParameterText
SpecField = Annotated[str, StringConstraints(pattern=r"^[a-z_]+$", max_length=64)]


class TemplateParameter(Body):
    """A value that a user of the template chooses."""

    type: Literal["string", "integer", "number", "boolean"] = "string"
    description: Annotated[Text, Field(max_length=500)] = ""
    default: Annotated[ParameterValue | None, Field(description="null: the parameter must be given")] = None
    choices: Annotated[
        list[ParameterValue] | None, Field(min_length=1, max_length=64, description="null: any value")
    ] = None
    example: Annotated[
        ParameterValue | None,
        Field(description="a valid value, with which a template is checked whose parameter has no default"),
    ] = None

    @model_validator(mode="after")
    def _values_have_the_type(self) -> Self:
        for name in ("default", "example"):
            value = getattr(self, name)
            if value is not None and (problem := self.problem_of(value)):
                raise PydanticCustomError("bad_value", "{name} {problem}", {"name": name, "problem": problem})
        for choice in self.choices or ():
            if not _has_type(self.type, choice):
                raise PydanticCustomError("bad_value", "a choice is no {type}", {"type": self.type})
        return self

    def problem_of(self, value: ParameterValue) -> str | None:
        """Why a value cannot be used, such as `must be an integer`; None: it can."""
        if not _has_type(self.type, value):
            return f"must be {'an' if self.type == 'integer' else 'a'} {self.type}"
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(map(str, self.choices))}"
        return None


def _has_type(wanted: str, value: ParameterValue) -> bool:
    if wanted == "boolean" or isinstance(value, bool):
        return wanted == "boolean" and isinstance(value, bool)
    kinds: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float)}
    return isinstance(value, kinds[wanted])


class TemplateApply(Body):
    """All that is requested of a template, as in a create."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
    scope: Annotated[
        Literal["project", "global"],
        Field(
            description="global: all projects see it, and only admins create it; `project_id` must be null"
        ),
    ] = "project"
    description: Annotated[Text, Field(max_length=1000)] = ""
    parameters: Annotated[dict[ParameterName, TemplateParameter], Field(max_length=MAX_PARAMETERS)] = {}
    spec: Annotated[
        dict[SpecField, JsonValue],
        Field(
            min_length=1,
            max_length=64,
            description="fields of an instance. `${name}` in a text is replaced by the parameter's value; a "
            "text that is nothing else becomes the value itself, also a number. `$${` stands for `${`",
        ),
    ]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scope == "global" and self.project_id is not None:
            raise PydanticCustomError("scope_of_no_project", "a global template is of no project")
        if len(to_json(self.spec)) > MAX_SPEC_BYTES:
            raise PydanticCustomError(
                "spec_too_large", "spec must be at most {most} bytes of JSON", {"most": MAX_SPEC_BYTES}
            )
        return self


class TemplateCreate(TemplateApply):
    """A new template."""

    name: Name


class TemplateRender(Body):
    """Values for the parameters of a template; those with defaults may be omitted."""

    parameters: Annotated[dict[ParameterName, ParameterValue], Field(max_length=MAX_PARAMETERS)] = {}


class Template(Answer):
    id: str
    name: str
    project_id: Annotated[str | None, Field(description="null: a global template, which all projects see")]
    description: str
    parameters: dict[str, TemplateParameter]
    spec: dict[str, Any]
    shipped: Annotated[bool, Field(description="it came with Mooring")]
    version: int
    created_at: Timestamp


class TemplateList(Answer):
    items: Annotated[list[Template], Field(max_length=200)]
    next_cursor: str | None


class RenderedTemplate(Answer):
    """A spec to create an instance with: the body of `POST /v1/instances`, to which more can be added."""

    template_id: str
    name: str
    spec: Json
