"""An instance as the scheduler's request."""

from datetime import datetime

from mooring.core.instance import InstanceSpec
from mooring.db.tables import Instance
from mooring.db.types import JsonObject
from mooring.scheduler.model import Request


def of_spec(spec: InstanceSpec, project_id: str) -> Request:
    """What would be asked for if there were such an instance."""
    return Request(
        instance_id="",
        queued_at=0,
        gpu_count=spec.gpus.count,
        gpu_model=spec.gpus.model,
        gpu_min_memory_mib=spec.gpus.min_memory_mib,
        cpu_milli=None if spec.cpus is None else round(spec.cpus * 1000),
        memory_mib=spec.memory_mib,
        node_selector=spec.node_selector,
        project_id=project_id,
    )


def of_row(row: Instance) -> Request:
    return of_columns(row.id, row.project_id, row.queued_at, row.spec)


def of_columns(instance_id: str, project_id: str, queued_at: datetime, spec: JsonObject) -> Request:
    # The spec was checked when it came in; building the model again for each tick would cost ten times
    # what the decision does.
    gpus = spec.get("gpus") or {}
    cpus = spec.get("cpus")
    return Request(
        instance_id=instance_id,
        queued_at=queued_at.timestamp(),
        gpu_count=gpus.get("count", 0),
        gpu_model=gpus.get("model"),
        gpu_min_memory_mib=gpus.get("min_memory_mib"),
        cpu_milli=None if cpus is None else round(cpus * 1000),
        memory_mib=spec.get("memory_mib"),
        node_selector=spec.get("node_selector") or {},
        project_id=project_id,
    )
