"""What a node is told of each instance that it should have; what is secret only while it may be started."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import gangs, instances, registries, secrets
from mooring.control.sealing import Sealer
from mooring.core.images import ImageName
from mooring.core.instance import HOLDS_GPUS, WHOLE_MILLI, DesiredState, InstanceSpec
from mooring.db.tables import Allocation, Gpu, Instance, Project
from mooring.schemas.agent import Assignment, GpuGrant, GroupMembership, RegistryAuth


@dataclass(frozen=True, slots=True)
class _Told:
    """All that the assignments of one answer are made of, by instance id, read with a query for each kind."""

    specs: Mapping[str, InstanceSpec]
    grants: Mapping[str, list[GpuGrant]]
    profiles: Mapping[str, str]  # by project id
    secrets: Mapping[str, dict[str, str]]
    registries: Mapping[str, RegistryAuth]
    groups: Mapping[str, GroupMembership]


def of(session: Session, sealer: Sealer, rows: Sequence[Instance]) -> list[Assignment]:
    """The assignments of a node's live instances. Every report of every node passes here."""
    if not rows:
        return []
    specs = {row.id: instances.spec_of(row) for row in rows}
    startable = [row for row in rows if _runs(row) and _may_start(row)]
    told = _Told(
        specs=specs,
        grants=_grants(session, rows),
        profiles=_profiles(session, rows),
        secrets=_secrets(session, sealer, startable, specs),
        registries=_registries(session, sealer, startable, specs),
        groups=gangs.memberships(session, rows),
    )
    return [_assignment(row, told) for row in rows]


def _grants(session: Session, rows: Sequence[Instance]) -> dict[str, list[GpuGrant]]:
    """With the memory of each. A card's facts are long, and read only where MIG devices are given."""
    held = Allocation
    columns = (held.instance_id, held.gpu_uuid, held.milli, held.mig_uuid, Gpu.memory_mib)
    query = select(*columns).join(Gpu, Gpu.uuid == held.gpu_uuid).order_by(held.id)
    found = session.execute(query.where(held.instance_id.in_([row.id for row in rows]), held.to_at.is_(None)))
    given = found.all()
    of_mig = _mig_memory(session, {row.gpu_uuid for row in given if row.mig_uuid})
    grants: dict[str, list[GpuGrant]] = defaultdict(list)
    for instance_id, gpu_uuid, milli, mig_uuid, card_mib in given:
        # A MIG device that does not tell its memory, or that is no more, has its part of the card's.
        memory_mib = of_mig.get(mig_uuid or "", card_mib * milli // WHOLE_MILLI)
        grant = GpuGrant(gpu_uuid=gpu_uuid, milli=milli, mig_uuid=mig_uuid, memory_mib=memory_mib)
        grants[instance_id].append(grant)
    return grants


def _mig_memory(session: Session, uuids: Collection[str]) -> dict[str, int]:
    if not uuids:
        return {}
    facts = session.scalars(select(Gpu.facts).where(Gpu.uuid.in_(uuids)))
    devices = (device for of_card in facts for device in of_card.get("mig_devices", ()))
    return {device["uuid"]: device["memory_mib"] for device in devices if device["memory_mib"]}


def _runs(row: Instance) -> bool:
    return row.desired_state is DesiredState.RUNNING and row.state in HOLDS_GPUS


def _may_start(row: Instance) -> bool:
    """Also of one that is `unreachable`: while its node's Docker is away, the node is told what to start."""
    return row.started_at is None


def _profiles(session: Session, rows: Sequence[Instance]) -> dict[str, str]:
    query = select(Project.id, Project.security_profile)
    return dict(session.execute(query.where(Project.id.in_({row.project_id for row in rows}))).all())


def _secrets(
    session: Session, sealer: Sealer, rows: Sequence[Instance], specs: Mapping[str, InstanceSpec]
) -> dict[str, dict[str, str]]:
    """Instance id -> variable -> value. Of a secret that is no more, nothing: the node refuses the start."""
    named = {row.id: secrets.references(specs[row.id]) for row in rows}
    wanted = {(row.project_id, name) for row in rows for name in named[row.id].values()}
    values = secrets.values(session, sealer, wanted)
    return {row.id: _that_fit(row.project_id, named[row.id], values) for row in rows if named[row.id]}


def _that_fit(
    project_id: str, named: Mapping[str, str], values: Mapping[secrets.Named, str]
) -> dict[str, str]:
    """Values may have grown since the instance was let in (`secrets.require`)."""
    fit: dict[str, str] = {}
    left = secrets.MOST_BYTES
    for variable, name in named.items():
        value = values.get((project_id, name))
        if value is not None and (left := left - len(value.encode())) >= 0:
            fit[variable] = value
    return fit


def _registries(
    session: Session, sealer: Sealer, rows: Sequence[Instance], specs: Mapping[str, InstanceSpec]
) -> dict[str, RegistryAuth]:
    hosts = {row.id: (row.project_id, ImageName.parse(specs[row.id].image).registry) for row in rows}
    known = registries.credentials(session, sealer, hosts.values())
    return {instance_id: known[host] for instance_id, host in hosts.items() if host in known}


def _readable(spec: InstanceSpec) -> InstanceSpec:
    """A list of models is what an agent of an earlier release could not read, and no agent needs it."""
    if not isinstance(spec.gpus.model, list):
        return spec
    return spec.model_copy(update={"gpus": spec.gpus.model_copy(update={"model": None})})


def _assignment(row: Instance, told: _Told) -> Assignment:
    return Assignment(
        instance_id=row.id,
        attempt=row.attempt,
        name=row.name,
        project_id=row.project_id,
        generation=row.generation,
        want="running" if _runs(row) else "stopped",
        may_start=_may_start(row),
        stop_timeout_s=row.stop_timeout_s,
        spec=_readable(told.specs[row.id]),
        gpu_uuids=list(dict.fromkeys(grant.gpu_uuid for grant in told.grants.get(row.id, ()))),
        grants=told.grants.get(row.id, []),
        isolation=(row.placed_as or {}).get("isolation"),
        cpus=(row.cpu_milli or 0) / 1000,
        memory_mib=row.memory_mib or 0,
        disk_mib=row.disk_mib or None,
        image_digest=row.image_digest,
        security_profile=told.profiles[row.project_id],
        secrets=told.secrets.get(row.id, {}),
        registry=told.registries.get(row.id),
        group=told.groups.get(row.id),
    )
