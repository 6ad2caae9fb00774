"""Prometheus metrics: of each GPU under the names of dcgm-exporter, and of the service itself."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import case, func, select, text
from sqlalchemy.orm import Session

from mooring.control.nodes import nodes
from mooring.db.tables import Allocation, Gpu, Instance, Node, Project, WebhookDelivery, WebhookProgress
from mooring.db.tables.webhooks import PENDING
from mooring_client.schemas.base import Json

# Field of a sample -> series of dcgm-exporter and its factor, so that existing dashboards work unchanged.
# https://github.com/NVIDIA/dcgm-exporter: etc/default-counters.csv
DCGM = {
    "utilization_gpu_pct": ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", 1),
    "utilization_memory_pct": ("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", 1),
    "memory_used_mib": ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", 1),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", 1),
    "temperature_c": ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", 1),
    "sm_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", 1),
    "memory_clock_mhz": ("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", 1),
    "fan_pct": ("DCGM_FI_DEV_FAN_SPEED", "Fan speed (in %).", 1),
    # dcgm counts millijoules.
    "energy_j": (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        1000,
    ),
}
LABELS = ("UUID", "gpu", "modelName", "Hostname", "instance_id", "project")


def families(session: Session) -> Iterator[Metric]:
    """All metric families."""
    yield from _gpu_families(session)
    yield _counted("mooring_instances", "Live instances by state.", "state", _instances_by_state(session))
    by_state = {str(state): count for state, count in nodes.count_by_state(session).items()}
    yield _counted("mooring_nodes", "Nodes by state.", "state", by_state)
    yield _counted("mooring_gpus", "GPUs by use.", "use", _gpus_by_use(session))
    yield from _webhook_families(session)


def _webhook_families(session: Session) -> Iterator[Metric]:
    progress = session.scalars(select(WebhookProgress)).one()
    text_ = "Deliveries of webhooks by outcome, and failed attempts."
    counter = CounterMetricFamily("mooring_webhook_deliveries", text_, labels=["outcome"])
    for outcome in ("delivered", "dropped", "failed", "retried"):
        counter.add_metric([outcome], getattr(progress, outcome))
    yield counter
    pending = session.scalar(select(func.count()).select_from(WebhookDelivery).where(text(PENDING))) or 0
    yield GaugeMetricFamily("mooring_webhook_pending", "Deliveries that are not finished.", pending)


def _counted(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _instances_by_state(session: Session) -> dict[str, int]:
    query = select(Instance.state, func.count()).where(Instance.deleted_at.is_(None)).group_by(Instance.state)
    return {str(state): count for state, count in session.execute(query)}


def _gpus_by_use(session: Session) -> dict[str, int]:
    held = func.sum(case((Gpu.milli_held > 0, 1), else_=0))
    query = (
        select(Gpu.health, held, func.count())
        .join(Node, Node.id == Gpu.node_id)
        .where(Node.deleted_at.is_(None))
        .group_by(Gpu.health)
    )
    counts = {"held": 0, "free": 0, "quarantined": 0, "lost": 0}
    for health, used, total in session.execute(query):
        counts["held"] += used
        counts["free" if health == "healthy" else str(health)] += total - used
    return counts


def _gpu_families(session: Session) -> list[GaugeMetricFamily]:
    by_field = {
        field: GaugeMetricFamily(name, text, labels=LABELS) for field, (name, text, _factor) in DCGM.items()
    }
    by_field["free"] = GaugeMetricFamily(
        "DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", labels=LABELS
    )
    holders = _holders(session)
    models = dict(session.execute(select(Gpu.uuid, Gpu.model)).all())
    for node in session.scalars(select(Node).where(Node.silent.is_(False), Node.deleted_at.is_(None))):
        for sample in node.samples:
            uuid = sample["uuid"]
            holder, project = holders.get(uuid, ("", ""))
            labels = [uuid, str(sample["index"]), models.get(uuid, ""), node.name, holder, project]
            _add(by_field, labels, sample)
    return list(by_field.values())


def _add(by_field: dict[str, GaugeMetricFamily], labels: list[str], sample: Json) -> None:
    for field, (_name, _text, factor) in DCGM.items():
        if sample.get(field) is not None:
            by_field[field].add_metric(labels, sample[field] * factor)
    if sample.get("memory_used_mib") is not None and sample.get("memory_total_mib") is not None:
        by_field["free"].add_metric(labels, sample["memory_total_mib"] - sample["memory_used_mib"])


def _holders(session: Session) -> dict[str, tuple[str, str]]:
    """GPU UUID -> the instance and the project that use it; each is "" if there are several."""
    query = (
        select(
            Allocation.gpu_uuid,
            func.min(Allocation.instance_id),
            func.max(Allocation.instance_id),
            func.min(Project.name),
            func.max(Project.name),
        )
        .join(Project, Project.id == Allocation.project_id)
        .where(Allocation.to_at.is_(None))
        .group_by(Allocation.gpu_uuid)
    )
    return {
        uuid: (first if first == last else "", first_project if first_project == last_project else "")
        for uuid, first, last, first_project, last_project in session.execute(query)
    }
