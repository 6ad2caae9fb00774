"""Single sign-on: one user for each issuer and subject of a token.

In each project a user has the higher of two roles: the membership's and the one from the token's claims.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit import audit_log
from mooring.core import ids, sign_on
from mooring.core.access import NONE, ROLE_PERMISSIONS, Access, Caller, Permission
from mooring.core.sign_on import Person, RoleGrant
from mooring.db.tables import Member, Project, User
from mooring.db.types import new_id, now
from mooring_client.errors import Unauthorized
from mooring_client.schemas.projects import Role

_NAME_MAX_LENGTH = 128


def identify(session: Session, person: Person) -> Caller | None:
    """The caller; None if `provision` must write something first.

    Raises:
        Unauthorized: the user was deleted.
    """
    row = _find(session, person)
    if row is None or (row.name, row.email) != _claimed(session, row, person):
        return None
    return _caller(session, row, person.grants)


def provision(session: Session, person: Person, address: str | None) -> Caller:
    """Create the user at the first request, or update name and e-mail from the token.

    Raises:
        Unauthorized: as `identify`.
    """
    locks.signing_on(session)
    row = _find(session, person)
    if row is None:
        row = _new(session, person)
        _record(session, row, "user.create", address, None, _described(row))
    elif (claimed := _claimed(session, row, person)) != (row.name, row.email):
        before = _described(row)
        row.name, row.email = claimed
        row.version += 1
        was, became = audit_log.changes(before, _described(row))
        _record(session, row, "user.update", address, was, became)
    return _caller(session, row, person.grants)


def _find(session: Session, person: Person) -> User | None:
    query = select(User).where(User.issuer == person.issuer, User.subject == person.subject)
    row = session.scalar(query)
    if row is not None and row.deleted_at is not None:
        raise Unauthorized("the token's user was deleted; ask an admin")
    return row


def _claimed(session: Session, row: User, person: Person) -> tuple[str, str | None]:
    """The name and e-mail of the token; those of the row where the token has none or the e-mail is taken."""
    name = person.name[:_NAME_MAX_LENGTH] if person.name else row.name
    if person.email in {None, row.email} or _is_taken(session, person.email):
        return name, row.email
    return name, person.email


def _is_taken(session: Session, email: str | None) -> bool:
    # An equal e-mail never links two accounts: an issuer may let people choose any e-mail.
    query = select(User.id).where(User.email == email, User.deleted_at.is_(None))
    return session.scalar(query) is not None


def _new(session: Session, person: Person) -> User:
    name = person.name or person.email or person.subject
    email = None if _is_taken(session, person.email) else person.email
    row = User(
        id=new_id(ids.USER), name=name[:_NAME_MAX_LENGTH], email=email, is_admin=False,
        issuer=person.issuer, subject=person.subject, version=1, created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def _described(row: User) -> dict[str, Any]:
    return {"name": row.name, "email": row.email, "issuer": row.issuer, "subject": row.subject}


def _record(
    session: Session,
    row: User,
    action: str,
    address: str | None,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any],
) -> None:
    access = Access(_actor(row), Permission.READ, action, address)
    audit_log.record(session, access, row.id, None, before=before, after=after)


def _actor(row: User) -> Caller:
    return Caller(id=row.id, kind="user", name=row.name, user_id=row.id)


def caller_of(session: Session, user_id: str) -> Caller:
    """The caller of a person, without roles that only a token grants. Raises Unauthorized: was deleted."""
    row = session.get(User, user_id)
    if row is None or row.deleted_at is not None:
        raise Unauthorized("the user was deleted")
    return _caller(session, row, ())


def _caller(session: Session, row: User, grants: Iterable[RoleGrant]) -> Caller:
    if row.is_admin or sign_on.ADMIN in grants:
        everywhere = frozenset({Permission.ADMIN})
        return Caller(id=row.id, kind="user", name=row.name, user_id=row.id, everywhere=everywhere)
    members = session.scalars(select(Member).where(Member.user_id == row.id)).all()
    granted = _in_projects(session, grants)
    held = {member.project_id: ROLE_PERMISSIONS[member.role] for member in members}
    for project_id, role in granted:
        # Each role includes the lower ones, so the union is the higher role.
        held[project_id] = held.get(project_id, NONE) | ROLE_PERMISSIONS[role]
    return Caller(
        id=row.id, kind="user", name=row.name, user_id=row.id, permissions=held, home=_home(members, granted)
    )


def _home(members: Iterable[Member], granted: Iterable[tuple[str, Role]]) -> str | None:
    """The default project: the only one that the organisation or an admin put the user into.

    An owner can add any user without asking. That must not change where the user's requests go.
    """
    chosen = {member.project_id for member in members if member.by_admin}
    chosen |= {project_id for project_id, _role in granted}
    return next(iter(chosen)) if len(chosen) == 1 else None


def _in_projects(session: Session, grants: Iterable[RoleGrant]) -> list[tuple[str, Role]]:
    """Project id and role of the grants whose project exists."""
    wanted = [(grant.project, grant.role) for grant in grants if grant.project and grant.role]
    if not wanted:
        return []
    names = {name for name, _role in wanted}
    query = select(Project.name, Project.id).where(Project.name.in_(names), Project.deleted_at.is_(None))
    found = dict(session.execute(query).all())
    return [(found[name], role) for name, role in wanted if name in found]
