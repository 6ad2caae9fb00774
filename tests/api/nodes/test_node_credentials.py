"""Renewal of a node's credential on an admin's request (R20)."""

import json
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from mooring.agent.sync.client import SESSION_CALL, ControlPlaneClient, CredentialRejected, Unreachable
from mooring.agent.sync.identity import NodeIdentity
from mooring.core import credentials
from mooring.db.tables import Node
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, simulated_node
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until


def post_renewal(node: WireNode) -> str:
    answer = node.http.post("/agent/v1/credential")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["credential"])


def use(node: WireNode, credential: str) -> None:
    node.http.headers["Authorization"] = f"Bearer {credential}"


def test_the_first_use_of_a_renewed_credential_ends_the_old_one(sandbox: Sandbox) -> None:
    node, old = sandbox.node, sandbox.node.identity.credential
    assert not node.sync().renew_credential
    accepted = sandbox.client.post(f"/v1/nodes/{node.id}/renew-credential")
    assert accepted.status_code == 202
    assert accepted.json()["id"] == node.id
    assert node.sync().renew_credential
    new = post_renewal(node)
    # The old one is valid until the new one is used: an agent may die before it stores the new one.
    node.sync()
    use(node, new)
    assert not node.sync().renew_credential
    use(node, old)
    # The service has cached the old credential, and rejects it all the same.
    problem(node.post_sync(), 401, "unauthorized")
    problem(node.http.post("/agent/v1/session"), 401, "unauthorized")
    problem(node.http.post("/agent/v1/credential"), 401, "unauthorized")
    use(node, new)
    node.sync()


def test_an_unused_renewed_credential_is_replaced_by_the_next(sandbox: Sandbox) -> None:
    node = sandbox.node
    lost, current = post_renewal(node), post_renewal(node)
    use(node, lost)
    problem(node.http.post("/agent/v1/session"), 401, "unauthorized")
    use(node, current)
    node.sync()


def test_only_hashes_are_stored(service: RunningService, client: Client, node: WireNode) -> None:
    new = post_renewal(node)
    with service.plane.database.read() as session:
        row = session.get_one(Node, node.id)
        assert row.next_credential_hash == credentials.hashed(new)
        assert row.credential_hash == credentials.hashed(node.identity.credential)


def _renewed(node: WireNode) -> tuple[ControlPlaneClient, NodeIdentity]:
    """The client of an agent that has renewed its credential and has not used the new one."""
    made = ControlPlaneClient(str(node.http.base_url))
    joined = NodeIdentity.from_answer(node.identity, SecretStr(node.identity.credential))
    made.identify(joined)
    identity = made.renewed(joined)
    made.identify(identity)
    return made, identity


def test_an_agent_whose_new_credential_was_replaced_uses_the_one_before(node: WireNode) -> None:
    """A request that was repeated on its way replaces the answered credential before its first use."""
    agent, identity = _renewed(node)
    post_renewal(node)  # the repeated request
    with pytest.raises(Unreachable):
        agent.call(SESSION_CALL)
    assert agent.call(SESSION_CALL).node_id == node.id
    assert agent.renewed(identity).former_credential == SecretStr(node.identity.credential)
    agent.close()


def test_an_agent_ends_if_neither_of_its_credentials_is_valid(node: WireNode) -> None:
    agent, identity = _renewed(node)
    unknown = {name: SecretStr(f"mn_{name}") for name in ("credential", "former_credential")}
    agent.identify(identity.model_copy(update=unknown))
    with pytest.raises(Unreachable):
        agent.call(SESSION_CALL)
    with pytest.raises(CredentialRejected):
        agent.call(SESSION_CALL)
    agent.close()


def test_an_agent_renews_and_stores_its_credential(client: Client, tmp_path: Path) -> None:
    def on_disk(name: str = "credential") -> str:
        return str(json.loads((tmp_path / "node.json").read_text())[name])

    with simulated_node(client, tmp_path, "renews") as node:
        wait_until(lambda: client.get(f"/v1/nodes/{node.id}").json()["state"] == "ready")
        old = on_disk()
        assert client.post(f"/v1/nodes/{node.id}/renew-credential").status_code == 202
        wait_until(lambda: on_disk() != old)
        assert on_disk("former_credential") == old
        made = client.create(gpus={"count": 1})
        client.wait(made["id"], "running")
        rejected = httpx.post(
            f"{client.base_url}/agent/v1/session", headers={"Authorization": f"Bearer {old}"}, timeout=10
        )
        problem(rejected, 401, "unauthorized")
        assert client.get(f"/v1/nodes/{node.id}").json()["state"] == "ready"
