"""Secrets: values that only containers see. They are kept sealed, and opened for a start only (R17)."""

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
from mooring.core.errors import Invalid, NameTaken
from mooring.core.instance.spec import InstanceSpec, SecretReference
from mooring.db.tables import Secret
from mooring.db.types import new_id, now

log = logging.getLogger(__name__)

# Of one instance together, as sealed: a value may be named often, and every answer to a node must fit.
MOST_BYTES = 1024 * 1024
_AT_ONCE = 1000  # databases take some ten thousand parameters

Named = tuple[str, str]  # a project and the name of one of its secrets


def create(
    session: Session, access: Access, sealer: Encryptor, project_id: str, name: str, value: str
) -> Secret:
    """A secret in a project that the caller was let into (`Access.project`).

    Raises:
        NameTaken: the project has one of this name.
        NotFound: the project is gone.
    """
    projects.locked(session, access, project_id)
    row_limits.require_room(session, Secret, project_id)
    if session.scalar(select(Secret.id).where(Secret.project_id == project_id, Secret.name == name)):
        raise NameTaken(f"a secret named {name} exists; replace its value or choose another name", name=name)
    row = Secret(
        id=new_id(ids.SECRET), project_id=project_id, name=name, sealed_value=sealer.seal(value.encode()),
        created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after={"name": name})
    return row


def replace(session: Session, access: Access, sealer: Encryptor, secret_id: str, value: str) -> Secret:
    """Give it another value, which containers get from their next start on.

    Raises:
        NotFound, Forbidden: as `owned.get`.
    """
    row = owned.locked(session, access, Secret, secret_id)
    row.sealed_value = sealer.seal(value.encode())
    audit_log.record(session, access, row.id, row.project_id, after={"name": row.name})
    return row


def delete(session: Session, access: Access, secret_id: str) -> None:
    """Raises NotFound, Forbidden: as `owned.get`."""
    row = owned.locked(session, access, Secret, secret_id)
    session.delete(row)
    audit_log.record(session, access, row.id, row.project_id, before={"name": row.name})


def references(spec: InstanceSpec) -> dict[str, str]:
    """Variable -> name of its secret."""
    return {
        variable: value.secret for variable, value in spec.env.items() if isinstance(value, SecretReference)
    }


def require(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Let a start pass whose secrets are there; without one its node would have to refuse it.

    Raises:
        Invalid: code `unknown_secret`: a variable names one that the project does not have;
            `secrets_too_large`: its values together are too much.
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
        raise Invalid(
            f"the project has no secret {named}; create it first with POST /v1/secrets",
            code="unknown_secret",
            errors=unknown[:100],
        )
    if sum(sizes[name] for name in wanted.values()) > MOST_BYTES:
        raise Invalid("the secrets that env names are too large together", code="secrets_too_large")


def _unknown(variable: str, name: str) -> dict[str, str]:
    message = f"the project has no secret {name}"
    return {"pointer": f"/env/{variable}", "code": "unknown_secret", "message": message}


def values(session: Session, sealer: Encryptor, wanted: Iterable[Named]) -> dict[Named, str]:
    """The values of those that are there: one query for any number of them that is usual."""
    opened = ((key, _opened(sealer, key, sealed)) for key, sealed in _sealed(session, wanted))
    return {key: value for key, value in opened if value is not None}


def _sealed(session: Session, wanted: Iterable[Named]) -> Iterator[tuple[Named, bytes]]:
    keys = sorted(set(wanted))
    for start in range(0, len(keys), _AT_ONCE):
        part = keys[start : start + _AT_ONCE]
        query = select(Secret.project_id, Secret.name, Secret.sealed_value)
        for project_id, name, sealed in session.execute(
            query.where(tuple_(Secret.project_id, Secret.name).in_(part))
        ):
            yield (project_id, name), sealed


def _opened(sealer: Encryptor, key: Named, sealed: bytes) -> str | None:
    """None when it cannot be read: one damaged row must not silence the whole node."""
    try:
        return sealer.open(sealed).decode()
    except InvalidToken:
        log.warning("secret %s of project %s cannot be decrypted; replace its value", key[1], key[0])
        return None
