"""Schemas of reservations: GPUs reserved for a project for a period."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer, Body, RequestTime, Timestamp
from mooring_client.schemas.gpus import Health
from mooring_client.schemas.spec import GpuModelName
from mooring_client.schemas.text import Name, Text

ReservationState = Literal["scheduled", "active", "ended"]
MAX_GPUS = 1024


class ReservedGpus(Body):
    """Whole GPUs of one model, on as few nodes as possible."""

    count: Annotated[int, Field(ge=1, le=MAX_GPUS)]
    model: Annotated[
        GpuModelName | Annotated[list[GpuModelName], Field(min_length=1, max_length=16)] | None,
        Field(description="as in an instance; several: the first available; null: any"),
    ] = None
    min_memory_mib: Annotated[int | None, Field(ge=1, le=2**31, description="of each GPU")] = None
    min_compute_capability: Annotated[
        Text | None, Field(pattern=r"^[1-9][0-9]?\.[0-9]$", description="of each GPU, such as `8.0`")
    ] = None


class ReservationApply(Body):
    """All that is requested of a reservation, as in a create."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
    gpus: ReservedGpus
    from_at: Annotated[
        RequestTime | None,
        Field(alias="from", description="null: now. Of a reservation that has begun, any past time is equal"),
    ] = None
    to_at: Annotated[RequestTime, Field(alias="to")]


class ReservationCreate(ReservationApply):
    """A new reservation. During its period, only the project's instances run on its GPUs."""

    name: Name
    from_at: Annotated[RequestTime | None, Field(alias="from", description="null: now")] = None


def _now() -> datetime:
    return datetime.now(UTC)


class ReservationPatch(Body):
    """The fields to change. Omitted fields stay unchanged."""

    # The defaults are never used: only the fields that were sent are read.
    name: Annotated[Name, Field(default_factory=str)]
    from_at: Annotated[RequestTime, Field(alias="from", default_factory=_now)]
    to_at: Annotated[RequestTime, Field(alias="to", default_factory=_now)]


class ReservedDevice(Answer):
    uuid: str
    node_id: str
    node_name: str
    index: int
    model: str
    memory_mib: int
    health: Health


class ReservedGpusShown(Answer):
    count: int
    model: str | list[str] | None
    min_memory_mib: int | None
    min_compute_capability: str | None


class Reservation(Answer):
    id: str
    name: str
    project_id: str
    gpus: ReservedGpusShown
    from_at: Annotated[Timestamp, Field(alias="from")]
    to_at: Annotated[Timestamp, Field(alias="to")]
    state: ReservationState
    devices: Annotated[list[ReservedDevice], Field(max_length=MAX_GPUS)]
    missing: Annotated[int, Field(description="number of its GPUs that are unhealthy; they are replaced")]
    awaited: Annotated[int, Field(description="number of its GPUs that other projects still use")]
    version: int
    created_at: Timestamp


class ReservationList(Answer):
    items: Annotated[list[Reservation], Field(max_length=200)]
    next_cursor: str | None
