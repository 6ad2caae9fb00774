"""Assignments of parts of GPUs, for tests of the agent."""

from typing import Any

from mooring.schemas.agent import Assignment
from tests.testbed.nvml.standin import uuid_of

GPU = uuid_of(0)
MIG_A, MIG_B = "MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"


def with_share(
    given: Assignment,
    memory_mib: int = 20_000,
    *,
    milli: int = 250,
    isolation: str = "shared",
    gpu: str = GPU,
) -> Assignment:
    """Return the assignment with a part of one GPU."""
    return _with(given, isolation, [{"gpu_uuid": gpu, "milli": milli, "memory_mib": memory_mib}])


def with_mig(given: Assignment, *uuids: str, gpu: str = GPU) -> Assignment:
    """Return the assignment with MIG devices of one GPU."""
    return _with(
        given,
        "mig",
        [{"gpu_uuid": gpu, "milli": 142, "mig_uuid": uuid, "memory_mib": 9728} for uuid in uuids],
    )


def with_gpus(given: Assignment, *uuids: str) -> Assignment:
    """Return the assignment with whole GPUs, as grants."""
    grants = [{"gpu_uuid": uuid, "milli": 1000, "memory_mib": 81_559} for uuid in uuids]
    return _with(given, "exclusive", grants)


def _with(given: Assignment, isolation: str, grants: list[dict[str, Any]]) -> Assignment:
    uuids = list(dict.fromkeys(grant["gpu_uuid"] for grant in grants))
    changed = {"isolation": isolation, "grants": grants, "gpu_uuids": uuids}
    return Assignment.model_validate({**given.model_dump(), **changed})
