"""Secrets: values that only containers see. Stored encrypted, decrypted only for a start (R17)."""

import logging
from collections.abc import Iterable, Iterator

from cryptography.fernet import InvalidToken
from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.tenants import owned, projects, row_limits
from mooring.control.tenants.encryption import Encryptor
from mooring.core import ids
from mooring.core.access import Access
from mooring.db.tables import Secret
from mooring.db.types import new_id, now
from mooring_client.errors import NameTaken, SecretsTooLarge, UnknownSecret
from mooring_client.schemas.spec import InstanceSpec, SecretReference

log = logging.getLogger(__name__)

# Of all values of an instance together: it may use a value many times, and answers to nodes are bounded.
MAX_BYTES = 1024 * 1024
_CHUNK = 1000  # databases limit a query to some ten thousand parameters

SecretKey = tuple[str, str]  # project id, secret name


def create(
    session: Session, access: Access, encryptor: Encryptor, project_id: str, name: str, value: str
) -> Secret:
    """Create a secret in a project from `Access.project`.

    Raises:
        NameTaken: the project has a secret of this name.
        NotFound: the project was deleted.
    """
    projects.locked(session, access, project_id)
    row_limits.require_room(session, Secret, project_id)
    if session.scalar(select(Secret.id).where(Secret.project_id == project_id, Secret.name == name)):
        raise NameTaken(f"a secret named {name} exists; replace its value or choose another name", name=name)
    row = Secret(
        id=new_id(ids.SECRET), project_id=project_id, name=name, created_at=now(),
        sealed_value=encryptor.encrypt(value.encode()),
    )  # fmt: skip
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after={"name": name})
    return row


def replace(session: Session, access: Access, encryptor: Encryptor, secret_id: str, value: str) -> Secret:
    """Set a new value, which containers get at their next start.

    Raises:
        NotFound, Forbidden: as `owned.get`.
    """
    row = owned.locked(session, access, Secret, secret_id)
    row.sealed_value = encryptor.encrypt(value.encode())
    audit_log.record(session, access, row.id, row.project_id, after={"name": row.name})
    return row


def delete(session: Session, access: Access, secret_id: str) -> None:
    """Raises NotFound, Forbidden: as `owned.get`."""
    row = owned.locked(session, access, Secret, secret_id)
    session.delete(row)
    audit_log.record(session, access, row.id, row.project_id, before={"name": row.name})


def references(spec: InstanceSpec) -> dict[str, str]:
    """Environment variable -> name of its secret."""
    return {
        variable: value.secret for variable, value in spec.env.items() if isinstance(value, SecretReference)
    }


def require(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Check that the secrets that a spec references exist, so that its node can start it.

    Raises:
        UnknownSecret: a variable names a secret that the project does not have.
        SecretsTooLarge: the values, encrypted, exceed `MAX_BYTES` together.
    """
    wanted = references(spec)
    if not wanted:
        return
    query = select(Secret.name, func.length(Secret.sealed_value))
    query = query.where(Secret.project_id == project_id, Secret.name.in_(set(wanted.values())))
    sizes: dict[str, int] = dict(session.execute(query).all())
    unknown = [_unknown(variable, name) for variable, name in wanted.items() if name not in sizes]
    if unknown:
        named = ", ".join(sorted({wanted[item["pointer"].removeprefix("/env/")] for item in unknown}))
        raise UnknownSecret(
            f"the project has no secret {named}; create it first with POST /v1/secrets",
            errors=unknown[:100],
        )
    if sum(sizes[name] for name in wanted.values()) > MAX_BYTES:
        raise SecretsTooLarge("the secrets that env names are too large together")


def _unknown(variable: str, name: str) -> dict[str, str]:
    message = f"the project has no secret {name}"
    return {"pointer": f"/env/{variable}", "code": "unknown_secret", "message": message}


def values(session: Session, encryptor: Encryptor, wanted: Iterable[SecretKey]) -> dict[SecretKey, str]:
    """The values of the secrets that exist and can be decrypted."""
    found = ((key, _decrypted(encryptor, key, value)) for key, value in _encrypted(session, wanted))
    return {key: value for key, value in found if value is not None}


def _encrypted(session: Session, wanted: Iterable[SecretKey]) -> Iterator[tuple[SecretKey, bytes]]:
    keys = sorted(set(wanted))
    for start in range(0, len(keys), _CHUNK):
        part = keys[start : start + _CHUNK]
        query = select(Secret.project_id, Secret.name, Secret.sealed_value)
        for project_id, name, encrypted in session.execute(
            query.where(tuple_(Secret.project_id, Secret.name).in_(part))
        ):
            yield (project_id, name), encrypted


def _decrypted(encryptor: Encryptor, key: SecretKey, encrypted: bytes) -> str | None:
    """None if it cannot be decrypted: one damaged row must not block all other instances of the node."""
    try:
        return encryptor.decrypt(encrypted).decode()
    except InvalidToken:
        log.warning("secret %s of project %s cannot be decrypted; replace its value", key[1], key[0])
        return None
