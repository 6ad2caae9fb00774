"""What a node is told of each instance that it should have; what is secret only while it may be started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import instances, registries, secrets
from mooring.control.sealing import Sealer
from mooring.core.images import ImageName
from mooring.core.instance import HOLDS_GPUS, DesiredState, InstanceSpec
from mooring.db.tables import Instance, Project
from mooring.schemas.agent import Assignment, RegistryAuth


@dataclass(frozen=True, slots=True)
class _Told:
    """All that the assignments of one answer are made of, by instance id, read with a query for each kind."""

    specs: Mapping[str, InstanceSpec]
    gpus: Mapping[str, list[str]]
    profiles: Mapping[str, str]  # by project id
    secrets: Mapping[str, dict[str, str]]
    registries: Mapping[str, RegistryAuth]


def of(session: Session, sealer: Sealer, rows: Sequence[Instance]) -> list[Assignment]:
    """The assignments of a node's live instances. Every report of every node passes here."""
    if not rows:
        return []
    specs = {row.id: instances.spec_of(row) for row in rows}
    startable = [row for row in rows if _runs(row) and _may_start(row)]
    told = _Told(
        specs=specs,
        gpus=instances.held_gpus(session, [row.id for row in rows]),
        profiles=_profiles(session, rows),
        secrets=_secrets(session, sealer, startable, specs),
        registries=_registries(session, sealer, startable, specs),
    )
    return [_assignment(row, told) for row in rows]


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
        spec=told.specs[row.id],
        gpu_uuids=told.gpus.get(row.id, []),
        cpus=(row.cpu_milli or 0) / 1000,
        memory_mib=row.memory_mib or 0,
        image_digest=row.image_digest,
        security_profile=told.profiles[row.project_id],
        secrets=told.secrets.get(row.id, {}),
        registry=told.registries.get(row.id),
    )
