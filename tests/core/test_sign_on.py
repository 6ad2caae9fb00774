"""Which roles the values of the roles claim grant, as operators configure."""

import pytest

from mooring.core.sign_on import ADMIN, RoleGrant, granted_by, parse_grants
from mooring_client.schemas.projects import Role

VISION = RoleGrant("vision", Role.MEMBER)
SPEECH = RoleGrant("speech", Role.OWNER)


@pytest.mark.parametrize(
    ("text", "grants"),
    [
        ("", {}),
        ("gpu-admins=admin", {"gpu-admins": (ADMIN,)}),
        ("a=vision:member, b = admin ,", {"a": (VISION,), "b": (ADMIN,)}),
        ("a=vision:member,a=speech:owner", {"a": (VISION, SPEECH)}),
        ("cn=gpu users=vision:member", {"cn=gpu users": (VISION,)}),
        ('{"a": "admin"}', {"a": (ADMIN,)}),
        (' {"cn=x,ou=y": ["vision:member", "speech:owner"]}', {"cn=x,ou=y": (VISION, SPEECH)}),
        ("{}", {}),
    ],
)
def test_both_forms_of_grants_are_parsed(text: str, grants: dict[str, tuple[RoleGrant, ...]]) -> None:
    assert parse_grants(text) == grants


@pytest.mark.parametrize(
    "text",
    [
        "admin", "=admin", "a=", "a=root", "a=vision", "a=vision:", "a=:member", "a=vision:admin", "a=Admin",
        "{", '{"a": 1}', '{"a": {"b": "admin"}}', '{"a": [["admin"]]}', '{"a": "vision:root"}',
    ],
)  # fmt: skip
def test_invalid_grants_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_grants(text)


def test_grants_of_all_values_are_combined() -> None:
    grants = {"a": (VISION,), "b": (SPEECH, VISION)}
    assert granted_by(["a", "b", "c", "A"], grants) == {VISION, SPEECH}
    assert granted_by([], grants) == frozenset()
