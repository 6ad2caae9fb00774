"""Safeguards that a node's operator has turned off are shown and audited (R1)."""

import pytest
from pydantic import SecretStr

from mooring.agent.settings import AgentSettings
from tests.nodes import WireNode
from tests.service import Client


def test_an_override_is_shown_and_audited_once(client: Client, node: WireNode) -> None:
    assert client.get(f"/v1/nodes/{node.id}").json()["overrides"] == []
    node.facts = node.facts.model_copy(update={"overrides": ["allow_unsafe_toolkit"]})
    node.sync()
    node.sync()
    assert client.get(f"/v1/nodes/{node.id}").json()["overrides"] == ["allow_unsafe_toolkit"]
    (entry,) = client.items("/v1/audit-log", action="node.override")
    assert (entry["actor"]["kind"], entry["actor"]["id"]) == ("node", node.id)
    assert (entry["before"], entry["after"]) == ({"overrides": []}, {"overrides": ["allow_unsafe_toolkit"]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"allow_unsafe_toolkit": True}, ("allow_unsafe_toolkit",)),
        ({"allow_unsafe_versions": True}, ("allow_unsafe_versions",)),
        (
            {"insecure_http": True, "network_isolation": "best_effort"},
            ("insecure_http", "network_isolation=best_effort"),
        ),
    ],
)
def test_an_agent_reports_its_overrides(given: dict[str, object], expected: tuple[str, ...]) -> None:
    assert AgentSettings(join_token=SecretStr("mj_x"), **given).overrides == expected  # type: ignore[arg-type]
