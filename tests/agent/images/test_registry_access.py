"""R16: whom a registry sees when the daemon asks it in the name of an assignment."""

import base64
import json

import pytest

from mooring.agent.images.registry_access import Wanted, headers
from mooring.core.images import ImageName
from tests.agent.docker_assignments import assignment, with_more

IMAGE = ImageName.parse("registry.example.com/team/image:1")


@pytest.mark.parametrize(
    ("registry", "given"),
    [
        ("registry.example.com", True),
        ("registry.example.com:5000", False),
        ("example.com", False),
        ("evil.registry.example.com", False),
        ("docker.io", False),
    ],
)
def test_credentials_are_for_their_own_registry_alone(registry: str, given: bool) -> None:
    credentials = {"server": "registry.example.com", "username": "ci", "password": "swordfish"}
    wanted = Wanted.by(with_more(assignment(image=str(IMAGE)), registry=credentials))
    assert (wanted.credentials_for(registry) is not None) is given


def test_without_credentials_the_registry_sees_nobody() -> None:
    """Said explicitly: left out, it could be the node's operator one day."""
    shown = headers(IMAGE, None)["X-Registry-Auth"]
    assert json.loads(base64.urlsafe_b64decode(shown)) == {}
