"""Permissions, roles, and the `Access` that every operation takes to check its caller.

A caller is an API key, person, node or join token, or the service itself. Permissions are per project; an
admin has all. Resources that the caller cannot see are not found (404); calls without permission get 403.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from mooring_client.errors import Forbidden, NotFound, ProjectRequired
from mooring_client.schemas.projects import Role


class Permission(StrEnum):
    """What an operation can require. All but OWN can be scopes of a key."""

    READ = "instances:read"
    WRITE = "instances:write"
    EXEC = "instances:exec"
    USAGE = "usage:read"
    METRICS = "metrics:read"  # of the whole service, not of a project
    OWN = "project:own"  # members, keys, registry credentials, the project's audit log
    ADMIN = "admin"


_VIEWER: Final = frozenset({Permission.READ, Permission.USAGE})
_MEMBER: Final = _VIEWER | {Permission.WRITE, Permission.EXEC}
ROLE_PERMISSIONS: Final[Mapping[Role, frozenset[Permission]]] = {
    Role.VIEWER: _VIEWER,
    Role.MEMBER: _MEMBER,
    Role.OWNER: _MEMBER | {Permission.OWN},
}
SCOPES: Final = frozenset(Permission) - {Permission.OWN}
# These are not limited to a project, so only an admin can grant them.
SERVICE_WIDE: Final = frozenset({Permission.METRICS, Permission.ADMIN})

NONE: Final[frozenset[Permission]] = frozenset()


def role_of(granted: frozenset[Permission]) -> Role | None:
    """The highest role of which all permissions are granted; null: none."""
    return next((role for role in reversed(Role) if granted >= ROLE_PERMISSIONS[role]), None)


def key_permissions(role: Role | None, scopes: frozenset[Permission]) -> frozenset[Permission]:
    """The permissions of a key: those of its role, restricted to its scopes if the key has any.

    A key without a role has the permissions of its scopes. A key with the role owner and scopes lacks OWN.
    """
    if role is None:
        return scopes
    return ROLE_PERMISSIONS[role] & scopes if scopes else ROLE_PERMISSIONS[role]


# Streams must end within five seconds of a revocation: each renews its access at this interval, and accepts a
# cached result that is no older.
RENEWED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a credential. It may be cached for a short time.

    Attributes:
        id: of the key, person or node; idempotency keys and rate limits are per id.
        permissions: by project; a project that is not listed is not visible.
        everywhere: permissions in all projects and in the service; admins have `admin`.
        home: the default project of a person with several; null: requests must name the project.
    """

    id: str
    kind: Literal["key", "user", "join_token", "node", "system"]
    name: str
    user_id: str | None = None
    project_id: str | None = None
    permissions: Mapping[str, frozenset[Permission]] = field(default_factory=dict)
    everywhere: frozenset[Permission] = NONE
    home: str | None = None

    @property
    def is_admin(self) -> bool:
        return Permission.ADMIN in self.everywhere

    @property
    def limited_as(self) -> str:
        """The key of limits that all callers of a project share; a person with several has limits alone."""
        return self.project_id or self.id

    def sees(self, project_id: str | None) -> bool:
        """Whether the caller may know that the project exists."""
        return self.is_admin or bool(project_id and self.permissions.get(project_id))

    def may(self, permission: Permission, project_id: str | None) -> bool:
        if self.is_admin or permission in self.everywhere:
            return True
        return project_id is not None and permission in self.permissions.get(project_id, NONE)

    def may_somewhere(self, permission: Permission) -> bool:
        if self.is_admin or permission in self.everywhere:
            return True
        return any(permission in granted for granted in self.permissions.values())


@dataclass(frozen=True, slots=True)
class Access:
    """The caller and origin of a request, and the permission that its operation requires.

    Attributes:
        permission: as in the table in `api/auth/rules.py`.
        action: the operation's name in the audit log; null: the operation is not recorded.
        address: of the client, if known.
    """

    caller: Caller
    permission: Permission
    action: str | None = None
    address: str | None = None
    request_id: str | None = None

    @property
    def projects(self) -> frozenset[str] | None:
        """The projects that the operation may access; null: all."""
        if self.caller.is_admin or self.permission in self.caller.everywhere:
            return None
        return frozenset(
            project_id
            for project_id, granted in self.caller.permissions.items()
            if self.permission in granted
        )

    def require(self, project_id: str | None, missing: str) -> None:
        """Raise unless the caller has the permission in the project.

        Args:
            missing: the message for callers who cannot see the project.

        Raises:
            NotFound: the caller cannot see the project.
            Forbidden: the caller sees the project, but lacks the permission.
        """
        if self.caller.may(self.permission, project_id):
            return
        if not self.caller.sees(project_id):
            raise NotFound(missing)
        raise lacking(self.permission)

    def project(self, project_id: str | None, default: str) -> str:
        """The project of a new resource: the requested one, else the caller's only project or home.

        Args:
            default: the project if a caller with the permission in all projects named none.

        Raises:
            NotFound, Forbidden: as `require`.
            ProjectRequired: the caller named no project, and has several but no home.
        """
        if project_id is not None:
            self.require(project_id, f"no project {project_id}")
            return project_id
        if self.projects is None:
            return default
        if len(self.projects) == 1:
            return next(iter(self.projects))
        if self.caller.home in self.projects:
            return self.caller.home
        raise ProjectRequired("you are in several projects; set project_id")


def lacking(permission: Permission) -> Forbidden:
    needed = {
        Permission.OWN: "the role owner in this project",
        Permission.ADMIN: "admin rights",
    }.get(permission, f"the scope {permission}")
    return Forbidden(f"this needs {needed}, which your credentials do not have", needed=str(permission))


# For actions of the service itself, which the audit log does not record: loops, and effects of reports.
SYSTEM: Final = Access(
    Caller("system", "system", "mooring", everywhere=frozenset({Permission.ADMIN})), Permission.ADMIN
)


def on_host(action: str) -> Access:
    """The access of a command on the server's host, which needs no key."""
    operator = Caller("host", "system", "operator on the host", everywhere=frozenset({Permission.ADMIN}))
    return Access(operator, Permission.ADMIN, action)
