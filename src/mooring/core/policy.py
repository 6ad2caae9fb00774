"""The scheduling policy. Its fields are settings of the server."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Policy(BaseModel):
    model_config = ConfigDict(frozen=True)

    # Added to each predicted end, for stopping, starting and pulling.
    start_overhead_s: ClassVar[float] = 30.0

    backfill: Annotated[
        Literal["easy", "conservative"],
        Field(description="backfill slots for the first pending request only, or for each"),
    ] = "easy"
    usage_half_life_s: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    overdue_after_s: Annotated[
        float, Field(ge=0, description="requests that waited longer come first within their priority")
    ] = 86_400.0
    preemption_min_run_s: Annotated[
        float, Field(ge=0, description="instances placed more recently are not evicted")
    ] = 300.0
