"""What an SSH key or certificate acts as: the API key or person that asked for it.

So it can do no more than that credential can do now, and ends with it.
"""

from dataclasses import dataclass, replace
from typing import Self

from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.tenants import api_keys, sso
from mooring.core import ids
from mooring.core.access import NONE, ROLE_PERMISSIONS, Access, Caller, Permission
from mooring.db.tables import ApiKey, User
from mooring_client.errors import NoMembership, Unauthorized
from mooring_client.schemas.projects import Role


@dataclass(frozen=True, slots=True)
class Holder:
    """An API key or a person, in one project or in all of theirs.

    Attributes:
        id: of the API key or the person.
        project_id: null: all projects.
    """

    id: str
    project_id: str | None

    @classmethod
    def of_access(cls, access: Access, project_id: str | None) -> Self:
        """The caller, in this project only.

        Raises:
            NotFound, Forbidden: the caller may not run commands there.
        """
        if project_id is not None:
            access.require(project_id, f"no project {project_id}")
        return cls(access.caller.id, project_id or access.caller.project_id)

    @property
    def is_api_key(self) -> bool:
        return self.id.startswith(f"{ids.API_KEY}_")

    @property
    def text(self) -> str:
        """As in the principals of a certificate: `key_…` or `key_…/prj_…`."""
        return self.id if self.project_id is None else f"{self.id}/{self.project_id}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        holder_id, _, project_id = text.partition("/")
        return cls(holder_id, project_id or None)


def locked(session: Session, holder: Holder) -> None:
    """Lock the credential, so that concurrent requests are counted, and its end waits for this transaction.

    Raises:
        NotFound: the project was deleted.
        NoMembership: the role of the person comes only from a sign-on token, and would end with it.
        Unauthorized: the credential was revoked meanwhile.
    """
    if holder.project_id is not None:
        locks.project_key(session, holder.project_id)
        locks.live_project(session, holder.project_id)
    kind = ApiKey if holder.is_api_key else User
    session.get(kind, holder.id, with_for_update=True, populate_existing=True)
    caller = caller_of(session, holder)
    if not caller.may_somewhere(Permission.EXEC):
        raise NoMembership(
            "your role here comes only from your organisation's sign-on; ask an owner to add you as a "
            "member, then try again"
        )


def caller_of(session: Session, holder: Holder) -> Caller:
    """The caller now.

    Raises:
        Unauthorized: the API key was revoked or has expired, or the user was deleted.
    """
    if holder.is_api_key:
        caller = api_keys.caller_of(session, holder.id)
    elif holder.id.startswith(f"{ids.USER}_"):
        caller = sso.caller_of(session, holder.id)
    else:
        raise Unauthorized("the certificate names no API key and no person")
    return caller if holder.project_id is None else _restricted(caller, holder.project_id)


def _restricted(caller: Caller, project_id: str) -> Caller:
    """The caller with its permissions in one project only."""
    held = ROLE_PERMISSIONS[Role.OWNER] if caller.is_admin else caller.permissions.get(project_id, NONE)
    held |= caller.everywhere & ROLE_PERMISSIONS[Role.OWNER]
    return replace(caller, project_id=project_id, permissions={project_id: held}, everywhere=NONE)
