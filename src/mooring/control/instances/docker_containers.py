"""Containers of Docker clients: what a client created, and the instance that runs it once it was started.

A container without an instance is not scheduled. Instances that were made otherwise have containers without a
row: their id is derived from the instance's.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, exists, func, or_, select, true
from sqlalchemy.orm import Session

from mooring.control import bootstrap, locks
from mooring.control.instances import instances
from mooring.control.tenants import projects
from mooring.core import ids
from mooring.core.access import SYSTEM, Access
from mooring.core.instance.state import ENDED
from mooring.db.session import notify
from mooring.db.signals import ObjectTopic, Topic
from mooring.db.tables import DockerContainer, Instance, Node
from mooring.db.types import now
from mooring_client.errors import BadRequest, MooringError, NameTaken, NotFound, TooManyRows
from mooring_client.schemas.states import DesiredState, Reason

MOST_NOT_STARTED: Final = 200  # of a project
NOT_STARTED_KEPT: Final = timedelta(days=1)
# A client that reads the output to its end removes the container itself, as soon as it has.
AUTO_REMOVED_AFTER: Final = timedelta(seconds=15)
MOST_LISTED: Final = 1000
_MOST_SWEPT: Final = 200
_SHORTEST_PREFIX: Final = 3
_HEX: Final = frozenset("0123456789abcdef")
AUTO_REMOVED = Reason(code="auto_removed", message="it has ended, and was started to be removed then")


@dataclass(frozen=True, slots=True)
class FoundContainer:
    """A container as Docker clients see it.

    Attributes:
        row: None: the instance was not made by a Docker client.
        instance: None: it was not started yet.
    """

    id: str
    row: DockerContainer | None
    instance: Instance | None
    node_name: str | None = None

    @property
    def name(self) -> str:
        if self.row is not None:
            return self.row.name
        return "" if self.instance is None else self.instance.name

    @property
    def project_id(self) -> str:
        owner = self.instance or self.row
        assert owner is not None
        return owner.project_id


def id_of(instance_id: str) -> str:
    """The id of a container that no Docker client created."""
    return hashlib.sha256(instance_id.encode()).hexdigest()


def topic(container_id: str) -> ObjectTopic:
    """Fires when the container is started or removed."""
    return Topic.instance(container_id)


def create(
    session: Session,
    access: Access,
    project_id: str | None,
    name: str,
    request: dict[str, Any],
    config: dict[str, Any],
    *,
    auto_remove: bool,
) -> DockerContainer:
    """Store a container that is not started yet.

    Args:
        request: the body of the request that creates its instance.
        config: what Docker clients see of it.

    Raises:
        NotFound, Forbidden, ProjectRequired: as `projects.for_new`.
        NameTaken: a container of the project has this name.
        TooManyRows: the project has too many that are not started.
    """
    project = projects.for_new(session, access, project_id, bootstrap.default_project_id(session))
    locks.projects(session, [project.id])  # two with the same name, or one too many, at the same time
    _remove_ended(session, DockerContainer.project_id == project.id)
    require_free(session, project.id, name)
    _require_room(session, project.id)
    row = DockerContainer(
        id=hashlib.sha256(token_hex(32).encode()).hexdigest(),
        project_id=project.id,
        caller_id=access.caller.id,
        name=name,
        config=config,
        request={**request, "project_id": project.id},
        auto_remove=auto_remove,
        created_at=now(),
    )
    session.add(row)
    return row


def _require_room(session: Session, project_id: str) -> None:
    query = select(func.count()).where(
        DockerContainer.project_id == project_id, DockerContainer.instance_id.is_(None)
    )
    count = session.scalar(query) or 0
    if count >= MOST_NOT_STARTED:
        raise TooManyRows(
            f"the project has {count} containers that were created and not started; remove some of them"
        )


def require_free(session: Session, project_id: str, name: str) -> None:
    """Raises NameTaken: another container of the project has this name."""
    of_row = select(DockerContainer.id).where(
        DockerContainer.project_id == project_id, DockerContainer.name == name
    )
    of_instance = select(Instance.id).where(
        Instance.project_id == project_id,
        Instance.name == name,
        Instance.deleted_at.is_(None),
        _HAS_NO_ROW,
    )
    if (taken := session.scalar(of_row) or session.scalar(of_instance)) is not None:
        raise NameTaken(
            f'Conflict. The container name "/{name}" is already in use by container "{taken}". '
            "You have to remove (or rename) that container to be able to reuse that name."
        )


def started(session: Session, container_id: str, instance_id: str) -> bool:
    """Record the instance of a container. Returns False if the container was removed meanwhile."""
    row = session.get(DockerContainer, container_id, with_for_update=True)
    if row is None:
        return False
    row.instance_id = instance_id
    notify(session, topic(container_id))
    return True


def rename(session: Session, container_id: str, name: str, instance_name: str | None) -> None:
    """Rename a container that a Docker client created.

    Args:
        instance_name: the name that its instance gets at the start; None: it keeps the present one.

    Raises:
        NameTaken.
        NotFound: it was removed.
    """
    row = session.get(DockerContainer, container_id)
    if row is not None:
        locks.projects(session, [row.project_id])
        row = session.get(DockerContainer, container_id, with_for_update=True, populate_existing=True)
    if row is None:
        raise NotFound(f"No such container: {container_id}")
    require_free(session, row.project_id, name)
    row.name = name
    if instance_name is not None:
        row.request = {**row.request, "name": instance_name}


def remove(session: Session, container_id: str, instance_id: str | None) -> bool:
    """Forget a container. Its instance, if any, is another matter.

    Args:
        instance_id: of the container, as the caller knows it.

    Returns:
        False if it was started meanwhile.
    """
    notify(session, topic(container_id))
    wanted = DockerContainer.id == container_id
    session.execute(delete(DockerContainer).where(wanted, DockerContainer.instance_id == instance_id))
    return session.scalar(select(DockerContainer.id).where(wanted)) is None


def find(session: Session, access: Access, reference: str) -> FoundContainer:
    """The container with this id, beginning of an id, name, or instance id.

    Raises:
        NotFound: there is none that the caller can see.
        BadRequest: the reference means several.
    """
    reference = reference.removeprefix("/")
    found = _by_row(session, access, reference) or _by_instance(session, access, reference)
    if len(found) > 1:
        exact = [each for each in found if reference in {each.id, each.name}]
        if len(exact) != 1:
            raise BadRequest(f"several containers match {reference}; give more of the id")
        found = exact
    if not found:
        raise NotFound(f"No such container: {reference}")
    return found[0]


def _by_row(session: Session, access: Access, reference: str) -> list[FoundContainer]:
    matches: ColumnElement[bool] = or_(
        DockerContainer.name == reference, DockerContainer.instance_id == reference
    )
    if _is_prefix(reference):
        matches = or_(matches, DockerContainer.id.startswith(reference, autoescape=True))
    query = select(DockerContainer).where(matches, _visible(access, DockerContainer)).limit(20)
    rows = list(session.scalars(query))
    return [each for each in _with_instances(session, rows) if each.row is not None]


def _by_instance(session: Session, access: Access, reference: str) -> list[FoundContainer]:
    query = select(Instance).where(Instance.deleted_at.is_(None), _visible(access, Instance), _HAS_NO_ROW)
    if reference.startswith(f"{ids.INSTANCE}_"):
        rows = session.scalars(query.where(Instance.id == reference)).all()
    else:
        rows = session.scalars(query.where(Instance.name == reference).limit(2)).all()
        if not rows and _is_prefix(reference):
            newest = session.scalars(query.order_by(Instance.id.desc()).limit(MOST_LISTED))
            rows = [each for each in newest if id_of(each.id).startswith(reference)]
    return _without_rows(session, rows)


def listed(session: Session, access: Access) -> list[FoundContainer]:
    """All containers that the caller sees, the newest first."""
    created = select(DockerContainer).where(_visible(access, DockerContainer)).limit(MOST_LISTED)
    with_rows = _with_instances(session, list(session.scalars(created)))
    known = [each.instance.id for each in with_rows if each.instance is not None]
    query = (
        select(Instance)
        .where(Instance.deleted_at.is_(None), _visible(access, Instance))
        .order_by(Instance.id.desc())
        .limit(MOST_LISTED)
    )
    others = [each for each in session.scalars(query) if each.id not in set(known)]
    found = [*with_rows, *_without_rows(session, others)]
    return sorted(found, key=lambda each: (each.row or each.instance).created_at, reverse=True)  # type: ignore[union-attr]


def _with_instances(session: Session, rows: Sequence[DockerContainer]) -> list[FoundContainer]:
    """Without those whose instance is deleted."""
    wanted = [row.instance_id for row in rows if row.instance_id is not None]
    query = select(Instance).where(Instance.id.in_(wanted), Instance.deleted_at.is_(None))
    found = {each.id: each for each in session.scalars(query)} if wanted else {}
    names = _node_names(session, found.values())
    return [
        FoundContainer(row.id, row, instance, names.get(instance.node_id or "") if instance else None)
        for row in rows
        if (instance := found.get(row.instance_id or "")) is not None or row.instance_id is None
    ]


def _without_rows(session: Session, rows: Sequence[Instance]) -> list[FoundContainer]:
    names = _node_names(session, rows)
    return [FoundContainer(id_of(row.id), None, row, names.get(row.node_id or "")) for row in rows]


def _node_names(session: Session, rows: Iterable[Instance]) -> dict[str, str]:
    wanted = {row.node_id for row in rows if row.node_id is not None}
    if not wanted:
        return {}
    return dict(session.execute(select(Node.id, Node.name).where(Node.id.in_(wanted))).tuples().all())


def _visible(access: Access, kind: type[DockerContainer | Instance]) -> ColumnElement[bool]:
    return true() if access.projects is None else kind.project_id.in_(access.projects)


# The others are known by the id and the name of their row only.
_HAS_NO_ROW: Final = ~exists().where(DockerContainer.instance_id == Instance.id)


def _is_prefix(reference: str) -> bool:
    return len(reference) >= _SHORTEST_PREFIX and set(reference) <= _HEX


# Removal of containers that were started with `--rm`, and of rows that are of no use.


def auto_remove(session: Session, container_id: str) -> None:
    """Delete the instance of a container that was started with `--rm`, if it has ended."""
    row = session.get(DockerContainer, container_id)
    if row is None or not row.auto_remove or row.instance_id is None:
        return
    try:
        instance, node = locks.instance(session, SYSTEM, row.instance_id)
    except MooringError:
        remove(session, container_id, row.instance_id)
        return
    if instance.state in ENDED:
        instances.end(session, instance, node, DesiredState.DELETED, 0, AUTO_REMOVED)
        remove(session, container_id, row.instance_id)


def due(session: Session) -> Sequence[str]:
    """The ids of containers that ended a while ago and were started with `--rm`."""
    query = (
        select(DockerContainer.id)
        .join(Instance, Instance.id == DockerContainer.instance_id)
        .where(
            DockerContainer.auto_remove.is_(True),
            Instance.state.in_(ENDED),
            Instance.stopped_at < now() - AUTO_REMOVED_AFTER,
        )
        .limit(_MOST_SWEPT)
    )
    return session.scalars(query).all()


def sweep(session: Session) -> None:
    """Delete the rows that are of no use."""
    _delete(session, unused())


def _remove_ended(session: Session, of: ColumnElement[bool]) -> None:
    _delete(session, of & _is_ended())


def _delete(session: Session, due: ColumnElement[bool]) -> None:
    session.execute(delete(DockerContainer).where(due).execution_options(synchronize_session=False))


def unused() -> ColumnElement[bool]:
    """Containers that were never started, and those whose instance is deleted."""
    not_started = DockerContainer.instance_id.is_(None)
    return or_(not_started & (DockerContainer.created_at < now() - NOT_STARTED_KEPT), _is_ended())


def _is_ended() -> ColumnElement[bool]:
    live = select(Instance.id).where(
        Instance.id == DockerContainer.instance_id, Instance.deleted_at.is_(None)
    )
    return DockerContainer.instance_id.is_not(None) & ~live.exists()
