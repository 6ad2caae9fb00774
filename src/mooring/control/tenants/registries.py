"""Credentials for image registries: write-only for users, sent to a node for a start (R16)."""

import logging
from collections.abc import Iterable

from cryptography.fernet import InvalidToken
from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.tenants import owned, projects, registry_rules, row_limits
from mooring.control.tenants.encryption import Encryptor
from mooring.core import ids
from mooring.core.access import Access
from mooring.core.images import registry_host
from mooring.db.tables import Registry
from mooring.db.types import new_id, now
from mooring.schemas.agent import RegistryAuth
from mooring_client.errors import NameTaken

log = logging.getLogger(__name__)

RegistryKey = tuple[str, str]  # project id, registry host as core/images.py normalizes it


def create(
    session: Session,
    access: Access,
    encryptor: Encryptor,
    project_id: str,
    server: str,
    username: str,
    password: str,
) -> Registry:
    """Create credentials in a project from `Access.project`.

    Raises:
        NameTaken: the project has credentials for this registry, under any of its names.
        NotFound: the project was deleted.
        Invalid: as `registry_rules.require`.
    """
    projects.locked(session, access, project_id)
    row_limits.require_room(session, Registry, project_id)
    host = registry_host(server)
    registry_rules.require(session, project_id, host, "/server")
    if session.scalar(select(Registry.id).where(Registry.project_id == project_id, Registry.server == host)):
        raise NameTaken(
            f"the project has credentials for {host}; replace their password or delete them", server=host
        )
    row = Registry(
        id=new_id(ids.REGISTRY), project_id=project_id, server=host, username=username,
        sealed_password=encryptor.encrypt(password.encode()), created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after=_described(row))
    return row


def _described(row: Registry) -> dict[str, str]:
    return {"server": row.server, "username": row.username}


def replace(
    session: Session, access: Access, encryptor: Encryptor, registry_id: str, password: str
) -> Registry:
    """Set a new password, which the next pull uses.

    Raises:
        NotFound, Forbidden: as `owned.get`.
    """
    row = owned.locked(session, access, Registry, registry_id)
    row.sealed_password = encryptor.encrypt(password.encode())
    audit_log.record(session, access, row.id, row.project_id, after=_described(row))
    return row


def delete(session: Session, access: Access, registry_id: str) -> None:
    """Raises NotFound, Forbidden: as `owned.get`."""
    row = owned.locked(session, access, Registry, registry_id)
    session.delete(row)
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def known(session: Session, wanted: Iterable[RegistryKey]) -> set[RegistryKey]:
    """Those of the registries that the projects have credentials for."""
    keys = sorted(set(wanted))
    if not keys:
        return set()
    query = select(Registry.project_id, Registry.server)
    found = session.execute(query.where(tuple_(Registry.project_id, Registry.server).in_(keys)))
    return {(project_id, server) for project_id, server in found}


def credentials(
    session: Session, encryptor: Encryptor, wanted: Iterable[RegistryKey]
) -> dict[RegistryKey, RegistryAuth]:
    """The projects' credentials for these registries."""
    keys = sorted(set(wanted))
    if not keys:
        return {}
    found = session.scalars(select(Registry).where(tuple_(Registry.project_id, Registry.server).in_(keys)))
    return {(row.project_id, row.server): auth for row in found if (auth := _decrypted(encryptor, row))}


def _decrypted(encryptor: Encryptor, row: Registry) -> RegistryAuth | None:
    """None if it cannot be decrypted: one damaged row must not block all other instances of the node."""
    try:
        password = encryptor.decrypt(row.sealed_password).decode()
    except InvalidToken:
        log.warning("the password of registry %s cannot be decrypted; replace it", row.id)
        return None
    return RegistryAuth(server=row.server, username=row.username, password=password)
