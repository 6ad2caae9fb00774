"""The user of a single sign-on token, and the roles that its claims grant."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooring_client.schemas.projects import Role


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """A role in the project of this name, if that project exists; without project and role, admin rights."""

    project: str | None = None
    role: Role | None = None


ADMIN = RoleGrant()

# Value of the roles claim -> the roles that it grants.
Grants = Mapping[str, tuple[RoleGrant, ...]]


@dataclass(frozen=True, slots=True)
class Person:
    """The content of a verified token.

    Attributes:
        name, email: null where the token has none.
        expires_at: in seconds since 1970.
    """

    issuer: str
    subject: str
    name: str | None
    email: str | None
    grants: frozenset[RoleGrant]
    expires_at: int


def parse_grants(text: str) -> dict[str, tuple[RoleGrant, ...]]:
    """Parse `{"admins": "admin", "vision": ["vision:member"]}` or `admins=admin,vision=vision:member`.

    Raises:
        ValueError: the text has neither form; the message says why.
    """
    if text.lstrip().startswith("{"):
        pairs = _pairs_of_json(text)
    else:
        pairs = [_pair(item) for item in text.split(",") if item.strip()]
    found: dict[str, tuple[RoleGrant, ...]] = {}
    for value, grant in pairs:
        found[value] = (*found.get(value, ()), _grant(grant))
    return found


def _pairs_of_json(text: str) -> list[tuple[str, str]]:
    listed: list[tuple[str, str]] = []
    for value, given in json.loads(text).items():
        grants = given if isinstance(given, list) else [given]
        if not all(isinstance(grant, str) for grant in grants):
            raise ValueError(f"{value!r} needs a role, or a list of roles")
        listed += [(value, grant) for grant in grants]
    return listed


def _pair(item: str) -> tuple[str, str]:
    # Directory names can contain `=`; grants never do.
    value, equals, grant = item.rpartition("=")
    if not equals or not value.strip():
        raise ValueError(f"{item.strip()!r} is not VALUE=ROLE")
    return value.strip(), grant.strip()


def _grant(text: str) -> RoleGrant:
    if text == "admin":
        return ADMIN
    project, colon, role = text.rpartition(":")
    if not (colon and project) or role not in set(Role):
        raise ValueError(f"{text!r} is neither admin nor PROJECT:ROLE with a role of {', '.join(Role)}")
    return RoleGrant(project, Role(role))


def granted_by(values: Iterable[str], grants: Grants) -> frozenset[RoleGrant]:
    """All that these values of the roles claim grant."""
    return frozenset(grant for value in values for grant in grants.get(value, ()))
