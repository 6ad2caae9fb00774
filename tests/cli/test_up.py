"""The settings and environment that `mooring up` passes to its local node."""

from typing import Any

import pytest

from mooring.agent.settings import AgentSettings
from mooring.cli.up import agent_environment, relaxed_settings
from mooring.settings import Settings


@pytest.mark.parametrize(
    ("given", "relaxed"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"behind_tls_proxy": True}, False),
        ({"host": "10.0.0.7", "behind_tls_proxy": True}, False),
    ],
)
def test_isolation_is_required_if_others_can_reach_the_api(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], relaxed: bool
) -> None:
    for name, value in relaxed_settings(Settings(**given)).items():
        monkeypatch.setenv(name, value)
    agent = AgentSettings()
    assert agent.network_isolation == ("best_effort" if relaxed else "required")
    assert agent.allow_unsafe_versions is relaxed


def test_the_agent_gets_no_secret_of_the_server() -> None:
    secrets = {
        "MOORING_BOOTSTRAP_ADMIN_KEY": "canary",
        "MOORING_ENCRYPTION_KEYS": "canary",
        "MOORING_DATABASE_URL": "postgresql://canary",
        "PGPASSWORD": "canary",
        "AWS_SECRET_ACCESS_KEY": "canary",
    }
    needed = {"PATH": "/bin", "DOCKER_HOST": "unix:///d.sock", "MOORING_NODE_NAME": "gpu-7", "LC_ALL": "C"}
    assert agent_environment(secrets | needed) == needed
