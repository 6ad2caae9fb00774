"""Turns an instance's spec into the scheduler's request."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mooring.db.types import JsonObject
from mooring.scheduler.model import Request
from mooring_client.schemas.gpus import mig_milli
from mooring_client.schemas.spec import WHOLE_MILLI, InstanceSpec


def of_spec(
    spec: InstanceSpec, project_id: str, project_selector: Mapping[str, str] | None = None
) -> Request:
    """The request of an instance that does not exist yet: `instance_id` is empty and `queued_at` 0."""
    return of_columns("", project_id, 0, spec.model_dump(mode="json"), project_selector)


def of_columns(
    instance_id: str,
    project_id: str,
    queued_at: float,
    spec: JsonObject,
    project_selector: Mapping[str, str] | None = None,
) -> Request:
    """The request of a stored instance.

    The spec is read as stored JSON: it was validated when it arrived, and building the model again would take
    ten times as long as the scheduler's decision. An earlier release may have stored fewer fields, so each
    has a default here.
    """
    gpus = spec.get("gpus") or {}
    cpus = spec.get("cpus")
    return Request(
        instance_id=instance_id,
        queued_at=queued_at,
        gpu_count=gpus.get("count", 0),
        gpu_models=_models(gpus.get("model")),
        gpu_min_memory_mib=gpus.get("min_memory_mib"),
        gpu_milli=_milli(gpus),
        mig_profile=gpus.get("mig_profile"),
        gpu_min_compute_capability=gpus.get("min_compute_capability"),
        same_numa=gpus.get("same_numa", False),
        cpu_milli=None if cpus is None else round(cpus * 1000),
        project_selector=project_selector or {},
        project_id=project_id,
        **{name: spec.get(name, default) for name, default in _COPIED.items()},
    )


# The fields that the scheduler reads as the spec has them, with their defaults.
_COPIED: dict[str, Any] = {
    field.name: InstanceSpec.model_fields[field.name].get_default(call_default_factory=True)
    for field in fields(Request)
    if field.name in InstanceSpec.model_fields
}


def _models(wanted: str | list[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    return (wanted,) if isinstance(wanted, str) else tuple(wanted)


def _milli(gpus: JsonObject) -> int:
    """As `GpuRequest.milli`."""
    if profile := gpus.get("mig_profile"):
        return mig_milli(profile)
    share = gpus.get("share")
    return WHOLE_MILLI if share is None else round(share * 1000)
