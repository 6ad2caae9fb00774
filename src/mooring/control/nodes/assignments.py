"""Assignments: what a node should run, without secrets (`control/nodes/start_secrets.py` has those)."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Row, select
from sqlalchemy.orm import Session, defer, undefer
from sqlalchemy.sql.base import ExecutableOption

from mooring.control.instances import gangs, instances
from mooring.control.tenants import registries, registry_rules, secrets
from mooring.control.volumes import mounts
from mooring.core.images import ImageName
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Allocation, Gpu, Instance, Node, Project
from mooring.schemas.agent import AssignedVolume, Assignment, GpuGrant, GroupMembership, KnownAssignment
from mooring_client.schemas.spec import WHOLE_MILLI, InstanceSpec
from mooring_client.schemas.states import DesiredState


@dataclass(frozen=True, slots=True)
class _Extras:
    """What assignments need besides the instances' rows, by instance id; read for all of them at once."""

    grants: Mapping[str, list[GpuGrant]]
    projects: Mapping[str, Row[Any]]  # by project id
    groups: Mapping[str, GroupMembership]
    volumes: Mapping[str, list[AssignedVolume]]


@dataclass(frozen=True, slots=True)
class AssignmentLists:
    """The assignments of one answer: complete ones, and those whose spec the agent already has."""

    complete: list[Assignment]
    unchanged: list[KnownAssignment]


def of(
    session: Session, node: Node, rows: Sequence[Instance], known: Mapping[str, str] | None
) -> AssignmentLists:
    """The assignments of a node's live instances, for a full answer to a report.

    Args:
        rows: loaded without their specs, which are large (`without_specs`).
        known: the `spec_version` of each instance whose spec the agent has; null: it keeps none.
    """
    if not rows:
        return AssignmentLists([], [])
    unknown = [row for row in rows if known is None or known.get(row.id) != spec_version(row)]
    specs = _specs(session, unknown)
    with_secrets = _with_secrets(session, unknown, specs)
    if not (node.facts or {}).get("asks_for_secrets"):
        # An agent of an earlier release would start it without its secrets: it waits for the agent's upgrade.
        rows = [row for row in rows if not (row.id in with_secrets and is_startable(row))]
    extras = _Extras(
        grants=_grants(session, rows),
        projects=_projects(session, rows),
        groups=gangs.memberships(session, rows),
        volumes=mounts.of_instances(session, [row.id for row in rows]),
    )
    rules = registry_rules.of(session)
    return AssignmentLists(
        complete=[
            Assignment(
                **_common(row, extras),
                spec=_readable(specs[row.id]),
                asks_for_secrets=row.id in with_secrets,
                registry_listed=rules.lists(ImageName.parse(specs[row.id].image).registry, row.project_id),
            )
            for row in rows
            if row.id in specs
        ],
        unchanged=[KnownAssignment(**_common(row, extras)) for row in rows if row.id not in specs],
    )


def without_specs() -> ExecutableOption:
    """Query option that leaves specs out: reading 150 specs of 250 KB took seconds in every report."""
    return defer(Instance.spec)


def spec_version(row: Instance) -> str:
    """Identifies the spec of an attempt; agents report which versions they have."""
    return f"{row.attempt}.{row.generation}"


def _specs(session: Session, rows: Sequence[Instance]) -> dict[str, InstanceSpec]:
    if not rows:
        return {}
    # One query loads the specs that `without_specs` left out of the rows.
    query = select(Instance).where(Instance.id.in_([row.id for row in rows])).options(undefer(Instance.spec))
    session.scalars(query).all()
    return instances.specs_of(session, rows)


def _with_secrets(session: Session, rows: Sequence[Instance], specs: Mapping[str, InstanceSpec]) -> set[str]:
    """The ids of instances whose start needs secrets or registry credentials."""
    hosts = {row.id: (row.project_id, ImageName.parse(specs[row.id].image).registry) for row in rows}
    known = registries.known(session, hosts.values())
    with_references = {instance_id for instance_id, spec in specs.items() if secrets.references(spec)}
    return with_references | {instance_id for instance_id, host in hosts.items() if host in known}


def _grants(session: Session, rows: Sequence[Instance]) -> dict[str, list[GpuGrant]]:
    """GPU allocations with their memory. The large GPU facts are read only for MIG devices."""
    row_ids = [row.id for row in rows]
    columns = (
        Allocation.instance_id, Allocation.gpu_uuid, Allocation.milli, Allocation.mig_uuid, Gpu.memory_mib,
    )  # fmt: skip
    query = select(*columns).join(Gpu, Gpu.uuid == Allocation.gpu_uuid).order_by(Allocation.id)
    query = query.where(
        Allocation.instance_id.in_(row_ids), Allocation.to_at.is_(None), Allocation.lost_node_id.is_(None)
    )
    allocated = session.execute(query).all()
    of_mig = _mig_memory(session, {row.gpu_uuid for row in allocated if row.mig_uuid})
    grants: dict[str, list[GpuGrant]] = defaultdict(list)
    for instance_id, gpu_uuid, milli, mig_uuid, gpu_mib in allocated:
        # A MIG device that is gone or reports no memory counts as its share of the GPU's memory.
        memory_mib = of_mig.get(mig_uuid or "", gpu_mib * milli // WHOLE_MILLI)
        grant = GpuGrant(gpu_uuid=gpu_uuid, milli=milli, mig_uuid=mig_uuid, memory_mib=memory_mib)
        grants[instance_id].append(grant)
    return grants


def _mig_memory(session: Session, uuids: Collection[str]) -> dict[str, int]:
    if not uuids:
        return {}
    facts = session.scalars(select(Gpu.facts).where(Gpu.uuid.in_(uuids)))
    devices = (device for of_gpu in facts for device in of_gpu.get("mig_devices", ()))
    return {device["uuid"]: device["memory_mib"] for device in devices if device["memory_mib"]}


def _runs(row: Instance) -> bool:
    return row.desired_state is DesiredState.RUNNING and row.state in HOLDS_GPUS


def is_startable(row: Instance) -> bool:
    """Whether its node should start it now: only then does the node get its secrets."""
    return _runs(row) and _may_start(row)


def _may_start(row: Instance) -> bool:
    """Whether the attempt has not run yet. It may be `unreachable` until its node can list containers."""
    return row.started_at is None


def _projects(session: Session, rows: Sequence[Instance]) -> dict[str, Row[Any]]:
    query = select(Project.id, Project.security_profile, Project.local_images)
    found = session.execute(query.where(Project.id.in_({row.project_id for row in rows})))
    return {row.id: cast(Row[Any], row) for row in found}


def _readable(spec: InstanceSpec) -> InstanceSpec:
    """Remove a list of GPU models: no agent needs it, and agents of an earlier release cannot parse it."""
    if not isinstance(spec.gpus.model, list):
        return spec
    return spec.model_copy(update={"gpus": spec.gpus.model_copy(update={"model": None})})


def _common(row: Instance, extras: _Extras) -> dict[str, Any]:
    """All fields of an assignment but its spec."""
    grants = extras.grants.get(row.id, [])
    return {
        "instance_id": row.id,
        "attempt": row.attempt,
        "name": row.name,
        "project_id": row.project_id,
        "generation": row.generation,
        "spec_version": spec_version(row),
        "want": "running" if _runs(row) else "stopped",
        "may_start": _may_start(row),
        "stop_timeout_s": row.stop_timeout_s,
        "gpu_uuids": list(dict.fromkeys(grant.gpu_uuid for grant in grants)),
        "grants": grants,
        "isolation": (row.placed_as or {}).get("isolation"),
        "cpus": (row.cpu_milli or 0) / 1000,
        "memory_mib": row.memory_mib or 0,
        "disk_mib": row.disk_mib or None,
        "image_digest": row.image_digest,
        "security_profile": extras.projects[row.project_id].security_profile,
        "local_images": extras.projects[row.project_id].local_images,
        "group": extras.groups.get(row.id),
        "volumes": extras.volumes.get(row.id, []),
    }
