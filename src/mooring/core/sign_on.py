"""Whom a token of the organisation's sign-on stands for, and what its claims give them here."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooring.core.access import Role


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """A role in the live project of that name; with neither, all that admins may do."""

    project: str | None = None
    role: Role | None = None


ADMIN = RoleGrant()

# Value of the roles claim -> what it gives.
Grants = Mapping[str, tuple[RoleGrant, ...]]


@dataclass(frozen=True, slots=True)
class Person:
    """What a verified token says.

    Attributes:
        name, email: null where the token says nothing of them.
        expires_at: in seconds since 1970.
    """

    issuer: str
    subject: str
    name: str | None
    email: str | None
    grants: frozenset[RoleGrant]
    expires_at: int


def parse_grants(text: str) -> dict[str, tuple[RoleGrant, ...]]:
    """`{"gpu-admins": "admin", "vision": ["vision:member"]}`, or `gpu-admins=admin,vision=vision:member`.

    Raises:
        ValueError: it is neither; the message says where.
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
            raise ValueError(f"{value!r} needs a role, or a list of them")
        listed += [(value, grant) for grant in grants]
    return listed


def _pair(item: str) -> tuple[str, str]:
    # Names in a directory hold `=` themselves; what they give never does.
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


def given(grants: Grants, values: Iterable[str]) -> frozenset[RoleGrant]:
    """What these values of the roles claim give together."""
    return frozenset(grant for value in values for grant in grants.get(value, ()))
