"""Settings of single sign-on, and their validation at the start."""

import os

import pytest
from pydantic import ValidationError

from mooring.core.sign_on import ADMIN, RoleGrant
from mooring.settings import Settings, is_private_channel
from mooring_client.schemas.projects import Role

ISSUER = "https://id.example.org/realms/lab"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MOORING_"):
            monkeypatch.delenv(name)


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ISSUER": ISSUER,
        "AUDIENCE": "mooring",
        "ROLES": "gpu-admins=admin,vision=vision:member",
        "ROLES_CLAIM": "realm_access.roles",
    }.items():
        monkeypatch.setenv(f"MOORING_OIDC_{name}", value)
    settings = Settings()
    assert (settings.oidc_issuer, settings.oidc_audience) == (ISSUER, "mooring")
    assert settings.oidc_roles == {"gpu-admins": (ADMIN,), "vision": (RoleGrant("vision", Role.MEMBER),)}
    assert settings.oidc_roles_claim == "realm_access.roles"
    monkeypatch.setenv("MOORING_OIDC_ROLES", '{"gpu-admins": ["admin"]}')
    assert Settings().oidc_roles == {"gpu-admins": (ADMIN,)}


def test_sso_is_off_by_default() -> None:
    settings = Settings()
    assert (settings.oidc_issuer, settings.oidc_roles) == (None, {})
    assert (settings.oidc_roles_claim, settings.oidc_name_claim, settings.oidc_email_claim) == (
        "groups",
        "name",
        "email",
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"issuer": "http://id.example.org", "audience": "a"}, "https"),
        ({"issuer": "id.example.org", "audience": "a"}, "https"),
        ({"issuer": "https://", "audience": "a"}, "https"),
        ({"issuer": "https://[", "audience": "a"}, "https"),
        ({"issuer": f"{ISSUER}?tenant=1", "audience": "a"}, "query"),
        ({"issuer": f"{ISSUER}#x", "audience": "a"}, "fragment"),
        ({"issuer": ISSUER}, "MOORING_OIDC_AUDIENCE"),
        ({"audience": "a"}, "MOORING_OIDC_ISSUER"),
        ({"roles": "a=admin"}, "MOORING_OIDC_ISSUER"),
        ({"issuer": ISSUER, "audience": "a", "roles": "a=root"}, "MOORING_OIDC_ROLES: 'root' is neither"),
        ({"issuer": ISSUER, "audience": "a", "roles": "{"}, "MOORING_OIDC_ROLES"),
    ],
    ids=str,
)
def test_incomplete_settings_and_unsafe_issuers_are_rejected(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"MOORING_OIDC_{name.upper()}", value)
    with pytest.raises(ValidationError, match=why):
        Settings()


@pytest.mark.parametrize(
    "url", ["https://id.example.org", "http://127.0.0.1:1/x", "http://[::1]/", "http://localhost"]
)
def test_https_issuers_and_issuers_on_loopback_are_accepted(url: str) -> None:
    assert is_private_channel(url)
    assert Settings(oidc_issuer=url, oidc_audience="a").oidc_issuer == url
