"""The scheduling policy. Its fields are settings of the server."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Policy(BaseModel):
    model_config = ConfigDict(frozen=True)

    start_overhead_s: ClassVar[float] = 30.0  # added to each predicted end for stopping, starting and pulling
    backfill: Annotated[
        Literal["easy", "conservative"],
        Field(description="backfill slots for the first pending request only, or for each"),
    ] = "easy"
    usage_half_life_s: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    # Requests that have waited longer come first within their priority.
    overdue_after_s: Annotated[float, Field(ge=0)] = 86_400.0
    preemption_min_run_s: Annotated[float, Field(ge=0)] = 300.0  # newer placements are not evicted
