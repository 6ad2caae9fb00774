"""The state of an instance, and its reason."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from mooring_client.schemas.text import printable


class State(StrEnum):
    """State of an instance. `deleted` appears only in events and in the last response of a wait."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    DELETED = "deleted"


class DesiredState(StrEnum):
    """The state that the instance should reach. API operations, deadlines and preemption set it."""

    RUNNING = "running"
    STOPPED = "stopped"
    DELETED = "deleted"


class Reason(BaseModel):
    """Why an instance is in its state: a stable `code` (docs/errors.md) and a sentence for humans."""

    model_config = ConfigDict(frozen=True)

    code: Annotated[str, AfterValidator(printable)]
    message: Annotated[str, AfterValidator(printable)]
