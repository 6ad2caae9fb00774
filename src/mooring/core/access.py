"""Permissions, roles, and the `Access` that every operation checks.

A caller is an API key or a signed-on person. Permissions are per project; an admin has all of them. Resources
that the caller cannot see are not found (404); operations that they may not call are forbidden (403).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from mooring.core.errors import Forbidden, NotFound, ProjectRequired


class Permission(StrEnum):
    """What an operation may require. All but OWN can be scopes of a key."""

    READ = "instances:read"
    WRITE = "instances:write"
    EXEC = "instances:exec"
    USAGE = "usage:read"
    METRICS = "metrics:read"  # of the whole service, not of a project
    OWN = "project:own"  # members, keys, registry credentials, the project's audit log
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
# These are not limited to a project, so only an admin can grant them.
SERVICE_WIDE: Final = frozenset({Permission.METRICS, Permission.ADMIN})

NONE: Final[frozenset[Permission]] = frozenset()


def role_of(granted: frozenset[Permission]) -> Role | None:
    """The highest role whose permissions are all included; null: none."""
    return next((role for role in reversed(Role) if granted >= ROLE_PERMISSIONS[role]), None)


def key_permissions(role: Role | None, scopes: frozenset[Permission]) -> frozenset[Permission]:
    """The permissions of a key: those of its role, restricted to its scopes if it has any.

    A key without a role has the permissions of its scopes. An owner's key with scopes loses OWN.
    """
    if role is None:
        return scopes
    return ROLE_PERMISSIONS[role] & scopes if scopes else ROLE_PERMISSIONS[role]


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a credential, maybe cached for a short time.

    Attributes:
        id: of the key or person; idempotency keys and rate limits are per id.
        permissions: by project; a project that is not listed is not visible.
        everywhere: permissions in all projects and the service; admins have `admin`.
        role: in the project of a key, for `/v1/me`.
        home: the default project of a caller with several; null: requests must name the project.
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
    """The caller, permission and origin of a request. Every operation takes one, so none can skip the check.

    Attributes:
        permission: required by the operation (see the table in `api/auth/rules.py`).
        action: its name in the audit log; null: it is not recorded.
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

        Raises:
            NotFound, Forbidden: as `require`.
            ProjectRequired: the caller has several projects and named none.
        """
        if project_id is not None:
            self.require(project_id, f"no project {project_id}")
            return project_id
        if self.projects is None:
            return default
        if len(self.projects) != 1 and self.caller.home in self.projects:
            return self.caller.home
        if len(self.projects) != 1:
            raise ProjectRequired("you are in several projects; set project_id")
        return next(iter(self.projects))


def lacking(permission: Permission) -> Forbidden:
    needed = {
        Permission.OWN: "the role owner in this project",
        Permission.ADMIN: "an admin",
    }.get(permission, f"the scope {permission}")
    return Forbidden(f"this needs {needed}, which your credentials do not give", needed=str(permission))


# Actions of the service itself: loops, and effects of reports. They are not in the audit log.
SYSTEM: Final = Access(
    Caller("system", "system", "mooring", everywhere=frozenset({Permission.ADMIN})), Permission.ADMIN
)


def on_host(action: str) -> Access:
    """The access of a command on the server's host, which needs no key."""
    operator = Caller("host", "system", "operator on the host", everywhere=frozenset({Permission.ADMIN}))
    return Access(operator, Permission.ADMIN, action)
