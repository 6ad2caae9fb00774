"""Who may do what: permissions, the roles that bundle them, and the one value that every verb asks.

A caller is a key or a person signed on. What they may do is known per project; an admin may do everything
everywhere. What a caller cannot see is not found (404); what they see and may not do is forbidden (403).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from mooring.core.errors import Forbidden, Invalid, NotFound


class Permission(StrEnum):
    """What a request may need. All but OWN can be given to a key as a scope."""

    READ = "instances:read"
    WRITE = "instances:write"
    EXEC = "instances:exec"
    USAGE = "usage:read"
    METRICS = "metrics:read"  # of the whole service, so of no project
    OWN = "project:own"  # members, keys, secrets of registries, the project's audit log
    ADMIN = "admin"


class Role(StrEnum):
    VIEWER = "viewer"
    MEMBER = "member"
    OWNER = "owner"


_VIEWER: Final = frozenset({Permission.READ, Permission.USAGE})
_MEMBER: Final = _VIEWER | {Permission.WRITE, Permission.EXEC}
ROLE_PERMISSIONS: Final[Mapping[Role, frozenset[Permission]]] = {
    Role.VIEWER: _VIEWER,
    Role.MEMBER: _MEMBER,
    Role.OWNER: _MEMBER | {Permission.OWN},
}
SCOPES: Final = frozenset(Permission) - {Permission.OWN}
# These look beyond any project, so only an admin gives them out.
SERVICE_WIDE: Final = frozenset({Permission.METRICS, Permission.ADMIN})

NONE: Final[frozenset[Permission]] = frozenset()


def role_of(held: frozenset[Permission]) -> Role | None:
    """The role that these permissions are the whole of; null: they are less than any."""
    return next((role for role in reversed(Role) if held >= ROLE_PERMISSIONS[role]), None)


def key_permissions(role: Role | None, scopes: frozenset[Permission]) -> frozenset[Permission]:
    """What a key may do in its project: its role's permissions, narrowed by its scopes if it has any.

    A key without a role may do what its scopes say. A narrowed owner's key is no owner's any more.
    """
    if role is None:
        return scopes
    return ROLE_PERMISSIONS[role] & scopes if scopes else ROLE_PERMISSIONS[role]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a credential stands for, as of a moment ago.

    Attributes:
        id: of the key, or of the person signed on: the scope of idempotency keys and rate limits.
        permissions: by project; a project that is not listed is not visible.
        everywhere: permissions in every project and beyond; admins hold `admin`.
        role: in the one project of a key, for `/v1/me`.
        home: of somebody in several projects, the one that requests go to which name none; null: none does.
    """

    id: str
    kind: Literal["key", "user", "join_token", "node", "system"]
    name: str
    user_id: str | None = None
    project_id: str | None = None
    role: Role | None = None
    permissions: Mapping[str, frozenset[Permission]] = field(default_factory=dict)
    everywhere: frozenset[Permission] = NONE
    home: str | None = None

    @property
    def is_admin(self) -> bool:
        return Permission.ADMIN in self.everywhere

    def sees(self, project_id: str | None) -> bool:
        """Whether the project exists as far as the caller may know."""
        return self.is_admin or bool(project_id and self.permissions.get(project_id))

    def may(self, permission: Permission, project_id: str | None) -> bool:
        if self.is_admin or permission in self.everywhere:
            return True
        return project_id is not None and permission in self.permissions.get(project_id, NONE)

    def may_somewhere(self, permission: Permission) -> bool:
        if self.is_admin or permission in self.everywhere:
            return True
        return any(permission in held for held in self.permissions.values())


@dataclass(frozen=True, slots=True)
class Access:
    """One request: who asks, for what, from where. Verbs take it, so that none can forget to look at it.

    Attributes:
        permission: what the operation needs (`api/auth/rules.py` has the table).
        action: under which name it is written into the audit log; null: it is not.
        address: of the client, as far as it is known.
    """

    caller: Caller
    permission: Permission
    action: str | None = None
    address: str | None = None
    request_id: str | None = None

    @property
    def projects(self) -> frozenset[str] | None:
        """The projects that the operation may touch; null: all."""
        if self.caller.is_admin or self.permission in self.caller.everywhere:
            return None
        return frozenset(
            project_id for project_id, held in self.caller.permissions.items() if self.permission in held
        )

    def require(self, project_id: str | None, missing: str) -> None:
        """Let pass who may do this in the project.

        Args:
            missing: the message for those who may not know that it exists.

        Raises:
            NotFound: it belongs to somebody else.
            Forbidden: it is visible, and this may not be done with it.
        """
        if self.caller.may(self.permission, project_id):
            return
        if not self.caller.sees(project_id):
            raise NotFound(missing)
        raise lacking(self.permission)

    def project(self, asked: str | None, default: str) -> str:
        """The project that something new goes to: the one asked for, else the caller's only one or home.

        Raises:
            NotFound, Forbidden: as `require`.
            Invalid: code `project_required`: the caller has several projects and names none.
        """
        if asked is not None:
            self.require(asked, f"no project {asked}")
            return asked
        if self.projects is None:
            return default
        if len(self.projects) != 1 and self.caller.home in self.projects:
            return self.caller.home
        if len(self.projects) != 1:
            raise Invalid("you are in several projects; say which with project_id", code="project_required")
        return next(iter(self.projects))


def lacking(permission: Permission) -> Forbidden:
    needed = {
        Permission.OWN: "the role owner in this project",
        Permission.ADMIN: "an admin",
    }.get(permission, f"the scope {permission}")
    return Forbidden(f"this needs {needed}, which your credentials do not give", needed=str(permission))


# What the service does by itself: loops, and what follows from reports. Not for the audit log.
SYSTEM: Final = Access(
    Caller("system", "system", "mooring", everywhere=frozenset({Permission.ADMIN})), Permission.ADMIN
)


def on_host(action: str) -> Access:
    """What the operator does with a command on the server's own host, where no key is needed."""
    operator = Caller("host", "system", "operator on the host", everywhere=frozenset({Permission.ADMIN}))
    return Access(operator, Permission.ADMIN, action)
