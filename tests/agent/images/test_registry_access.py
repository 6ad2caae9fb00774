"""R16: the credentials that a registry receives for an assignment."""

import base64
import json

import pytest

from mooring.agent.images.registry_access import Wanted, headers
from mooring.core.images import ImageName
from tests.agent.docker_assignments import assignment, with_more

IMAGE = ImageName.parse("registry.example.com/team/image:1")


@pytest.mark.parametrize(
    ("registry", "sent"),
    [
        ("registry.example.com", True),
        ("registry.example.com:5000", False),
        ("example.com", False),
        ("evil.registry.example.com", False),
        ("docker.io", False),
    ],
)
def test_credentials_are_sent_to_their_own_registry_only(registry: str, sent: bool) -> None:
    credentials = {"server": "registry.example.com", "username": "ci", "password": "swordfish"}
    wanted = Wanted.of(with_more(assignment(image=str(IMAGE)), registry=credentials))
    assert (wanted.credentials_for(registry) is not None) is sent


def test_without_credentials_the_header_is_empty() -> None:
    """It is sent nevertheless: without the header, Docker might use the operator's credentials."""
    header = headers(IMAGE, None)["X-Registry-Auth"]
    assert json.loads(base64.urlsafe_b64decode(header)) == {}
