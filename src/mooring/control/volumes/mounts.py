"""Mounts: which volumes an instance has, and what they require of its node."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from sqlalchemy import Row, or_, select
from sqlalchemy.orm import Session

from mooring.control import events
from mooring.db.tables import Instance, InstanceVolume, Node, NodeVolume, Volume
from mooring.db.types import JsonObject
from mooring.scheduler.model import Placement, VolumeNeeds
from mooring.schemas.agent import AssignedVolume
from mooring_client.errors import UnknownVolume, VolumeNotForGroups, VolumesApart
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import State

LOCAL: Final = "local"


def require(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Check that the project has the volumes of a spec, and that one node can have all of them.

    Raises:
        UnknownVolume: it has no such volume.
        VolumesApart: two of them are on different nodes.
    """
    if spec.volumes:
        found = resolve(session, project_id, spec)
        _require_one_node(session, found.values())


def resolve(
    session: Session, project_id: str, spec: InstanceSpec, *, locked: bool = False
) -> dict[str, Volume]:
    """The volumes of a spec, by what it calls them.

    Args:
        locked: no other transaction deletes them before this one has ended.

    Raises:
        UnknownVolume: the project has no such volume.
    """
    names = {mount.volume for mount in spec.volumes}
    query = select(Volume).where(
        Volume.project_id == project_id,
        Volume.deleted_at.is_(None),
        or_(Volume.id.in_(names), Volume.name.in_(names)),
    )
    if locked:
        query = query.with_for_update(read=True, key_share=True).execution_options(populate_existing=True)
    rows = session.scalars(query.order_by(Volume.id)).all()
    by_name = {row.name: row for row in rows} | {row.id: row for row in rows}
    if unknown := [
        _unknown(position, mount.volume)
        for position, mount in enumerate(spec.volumes)
        if mount.volume not in by_name
    ]:
        raise UnknownVolume(f"{unknown[0]['message']}; create it with POST /v1/volumes", errors=unknown)
    return {name: by_name[name] for name in names}


def _unknown(position: int, name: str) -> dict[str, str]:
    message = f"the project has no volume {name}"
    return {"pointer": f"/volumes/{position}/volume", "code": "unknown_volume", "message": message}


def _require_one_node(session: Session, volumes: Iterable[Volume]) -> None:
    where = {row.name: row.node_id for row in volumes if row.node_id is not None}
    if len(set(where.values())) > 1:
        names = dict(session.execute(select(Node.id, Node.name).where(Node.id.in_(where.values()))).all())
        nodes = {volume: names[node_id] for volume, node_id in sorted(where.items())}
        listed = ", ".join(f"{volume} on {node}" for volume, node in nodes.items())
        raise VolumesApart(f"no node has all of these volumes: {listed}", nodes=nodes)


def attach(session: Session, spec: InstanceSpec, rows: Sequence[Instance]) -> None:
    """Record the mounts of new instances, all of one spec. From now on their volumes cannot be deleted.

    Raises:
        UnknownVolume: a volume was deleted meanwhile.
    """
    if not spec.volumes:
        return
    found = resolve(session, rows[0].project_id, spec, locked=True)
    session.flush()
    session.add_all(
        InstanceVolume(
            instance_id=row.id,
            position=position,
            volume_id=found[mount.volume].id,
            path=mount.path,
            read_only=mount.read_only,
        )
        for row in rows
        for position, mount in enumerate(spec.volumes)
    )


def require_for_groups(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Raises VolumeNotForGroups: members of a group run on several nodes, but a local volume is on one."""
    if not spec.volumes:
        return
    found = resolve(session, project_id, spec)
    if local := sorted(row.name for row in found.values() if row.driver == LOCAL):
        raise VolumeNotForGroups(
            f"members of a group run on several nodes, and the local volume {local[0]} is on one; use an nfs "
            "or cache volume",
        )


# --- for the scheduler

_NEEDS: Final = (
    select(
        InstanceVolume.instance_id,
        Volume.name,
        Volume.node_id,
        Volume.node_selector,
        Node.name.label("node_name"),
    )
    .join(Volume, Volume.id == InstanceVolume.volume_id)
    .outerjoin(Node, Node.id == Volume.node_id)
    .order_by(InstanceVolume.instance_id, InstanceVolume.position)
)


def needs_of_pending(session: Session) -> dict[str, VolumeNeeds]:
    """What the volumes of pending instances require, by instance; without those that mount none."""
    by_instance: dict[str, list[Row[Any]]] = defaultdict(list)
    query = _NEEDS.join(Instance, Instance.id == InstanceVolume.instance_id)
    for row in session.execute(query.where(Instance.state == State.PENDING)):
        by_instance[row.instance_id].append(cast(Row[Any], row))
    return {instance_id: _needs(rows) for instance_id, rows in by_instance.items()}


def needs_of(session: Session, project_id: str, spec: InstanceSpec) -> VolumeNeeds | None:
    """What the volumes of a spec require; None: it mounts none. Raises UnknownVolume."""
    if not spec.volumes:
        return None
    ids = [row.id for row in resolve(session, project_id, spec).values()]
    columns = (Volume.name, Volume.node_id, Volume.node_selector, Node.name.label("node_name"))
    query = select(*columns).outerjoin(Node, Node.id == Volume.node_id).where(Volume.id.in_(ids))
    return _needs(cast(Sequence[Row[Any]], session.execute(query.order_by(Volume.id)).all()))


def _needs(rows: Sequence[Row[Any]]) -> VolumeNeeds:
    bound = {row.name: row.node_name for row in rows if row.node_id is not None}
    # Each selector holds only until its volume has a node.
    selectors = {item for row in rows if row.node_id is None for item in row.node_selector.items()}
    node_ids = {row.node_id for row in rows if row.node_id is not None}
    return VolumeNeeds(
        node_ids=frozenset(node_ids),
        selector=tuple(sorted(selectors)),
        where=", ".join(f"volume {name} is on {node}" for name, node in bound.items()),
    )


# --- for placements


@dataclass(frozen=True, slots=True)
class _Bound:
    """A locked volume of a placed instance, and its node so far."""

    row: Volume
    node_id: str | None


class VolumeGuard:
    """Checks placements against locked volumes, and binds local volumes to the nodes of accepted ones."""

    def __init__(self, session: Session, placements: Sequence[Placement]) -> None:
        self._session = session
        self._of_instance: dict[str, list[str]] = defaultdict(list)
        query = select(InstanceVolume.instance_id, InstanceVolume.volume_id)
        wanted = {placement.instance_id for placement in placements}
        for instance_id, volume_id in session.execute(query.where(InstanceVolume.instance_id.in_(wanted))):
            self._of_instance[instance_id].append(volume_id)
        self._volumes = {row.id: _Bound(row, row.node_id) for row in self._locked()}

    def _locked(self) -> Sequence[Volume]:
        ids = {volume_id for volumes in self._of_instance.values() for volume_id in volumes}
        if not ids:
            return ()
        query = select(Volume).where(Volume.id.in_(ids)).order_by(Volume.id)
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
        return self._session.scalars(query).all()

    def fits(self, placement: Placement, facts: Mapping[str, Any]) -> bool:
        """Whether the node can have the volumes: it supports them, and none is on another node."""
        volumes = [self._volumes[each] for each in self._of_instance.get(placement.instance_id, ())]
        return all(self._is_possible(each, placement.node_id, facts) for each in volumes)

    @staticmethod
    def _is_possible(volume: _Bound, node_id: str, facts: Mapping[str, Any]) -> bool:
        if volume.row.deleted_at is not None or not facts.get("mounts_volumes"):
            return False
        if volume.row.driver != LOCAL:
            return True
        if volume.node_id is not None:
            return volume.node_id == node_id
        labels = facts.get("labels", {})
        return all(labels.get(key) == value for key, value in volume.row.node_selector.items())

    def take(self, placement: Placement) -> None:
        """Count a placement that is accepted: further ones must be where its local volumes then are."""
        for volume_id in self._of_instance.get(placement.instance_id, ()):
            volume = self._volumes[volume_id]
            if volume.row.driver == LOCAL:
                self._volumes[volume_id] = _Bound(volume.row, placement.node_id)

    def bind(self, placed: Sequence[Placement], generations: Mapping[str, int]) -> None:
        """Write which nodes now have the volumes of placed instances.

        Args:
            generations: of the nodes, the ones that have these instances.
        """
        pairs = {
            (volume_id, placement.node_id)
            for placement in placed
            for volume_id in self._of_instance.get(placement.instance_id, ())
        }
        for volume_id, node_id in sorted(pairs):
            row = self._volumes[volume_id].row
            if row.driver == LOCAL and row.node_id is None:
                row.node_id, row.version = node_id, row.version + 1
                events.volume_changed(self._session, row, "placed")
            copy = self._session.get(NodeVolume, (volume_id, node_id))
            if copy is None:
                copy = NodeVolume(volume_id=volume_id, node_id=node_id)
                self._session.add(copy)
            copy.node_generation = generations[node_id]


# --- for nodes


def of_instances(session: Session, instance_ids: Collection[str]) -> dict[str, list[AssignedVolume]]:
    """The mounts of instances, as their nodes get them, by instance."""
    columns = (
        InstanceVolume.instance_id, InstanceVolume.path, InstanceVolume.read_only,
        Volume.id, Volume.project_id, Volume.driver, Volume.size_mib, Volume.options,
    )  # fmt: skip
    query = select(*columns).join(Volume, Volume.id == InstanceVolume.volume_id)
    query = query.where(InstanceVolume.instance_id.in_(instance_ids))
    found: dict[str, list[AssignedVolume]] = defaultdict(list)
    for row in session.execute(query.order_by(InstanceVolume.instance_id, InstanceVolume.position)):
        found[row.instance_id].append(_assigned(cast(Row[Any], row)))
    return found


def _assigned(row: Row[Any]) -> AssignedVolume:
    options: JsonObject = row.options
    return AssignedVolume(
        volume_id=row.id,
        project_id=row.project_id,
        driver=row.driver,
        size_mib=row.size_mib,
        path=row.path,
        read_only=row.read_only,
        server=options.get("server"),
        exported_path=options.get("path"),
        version=options.get("version"),
        hard=bool(options.get("hard")),
    )
