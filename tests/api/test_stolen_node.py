"""What a stolen node credential gives access to, and that it gives no more (findings 5 and 14)."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mooring.schemas.agent import Assignment, SyncAnswer
from tests.api.conftest import Corner
from tests.nodes import WireNode, seen
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

SECRET = "S3CRET-of-the-victim"
PASSWORD = "REGPASS-of-the-victim"
MARK = "env-of-the-victim"
REGISTRY = "registry.victim.example.com"


@pytest.fixture
def thief(corner: Corner, shared: Client) -> Iterator[WireNode]:
    """A node of one H100 that has joined and reported as its operator set it up."""
    made = WireNode(shared, f"thief-{corner.node.name}", gpus=1)
    made.facts = made.facts.model_copy(update={"labels": {"zone": "thief"}})
    made.sync()
    yield made
    shared.delete(f"/v1/nodes/{made.id}", params={"force": True})
    made.close()


def victims(corner: Corner) -> dict[str, Any]:
    """Fields of a create that names a secret, credentials of a registry and an env of the victim's."""
    name = f"token-{corner.node.name}"
    corner.client.post("/v1/secrets", json={"name": name, "value": SECRET})
    body = {"server": REGISTRY, "username": "ci", "password": PASSWORD}
    corner.client.post("/v1/registries", json=body)
    return {"image": f"{REGISTRY}/app:1", "env": {"TOKEN": {"secret": name}, "MARK": MARK}}


def shown(corner: Corner, node: WireNode) -> dict[str, Any]:
    return dict(corner.client.get(f"/v1/nodes/{node.id}").json())


def hears_nothing_of(answer: SyncAnswer, assignment: Assignment) -> None:
    text = answer.model_dump_json()
    assert answer.assignments == []
    assert answer.streams == []
    for canary in (SECRET, PASSWORD, MARK, REGISTRY, assignment.name, assignment.project_id):
        assert canary not in text
    # What it says that it holds and does not, it may remove: no more than it said is told of it.
    told = {"instance_id": assignment.instance_id, "attempt": assignment.attempt, "stop_timeout_s": 10}
    assert all(removal.model_dump() == told for removal in answer.removals)


def test_a_node_hears_of_its_own_instances_only(corner: Corner, thief: WireNode) -> None:
    fields = victims(corner)
    waiting, running = corner.placed(**fields), corner.running(gpus={"count": 1}, **fields)
    corner.client.post(f"/v1/instances/{running.instance_id}/stop", json={"timeout_s": 3333})
    assert shown(corner, corner.node)["state"] == "ready"
    for assignment in (waiting, running):
        for phase in ("starting", "running", "exited", "refused"):
            hears_nothing_of(thief.sync(seen(assignment, phase)), assignment)
        older = seen(assignment, "running").model_copy(update={"attempt": 0})
        answer = thief.sync(older)
        assert (answer.assignments, [gone.stop_timeout_s for gone in answer.removals]) == ([], [10])
        orphan = {
            "container_id": "c", "name": "n", "instance_id": assignment.instance_id, "control_plane_id": None
        }  # fmt: skip
        hears_nothing_of(thief.sync(orphans=[orphan]), assignment)
        hears_nothing_of(thief.sync(instances=None), assignment)
    assert corner.client.instance(waiting.instance_id)["state"] == "scheduled"


def test_a_node_hears_of_no_stream_of_another_node(corner: Corner, thief: WireNode) -> None:
    assignment = corner.running()
    answers: list[httpx.Response] = []
    path = f"/v1/instances/{assignment.instance_id}/exec"
    asking = threading.Thread(
        target=lambda: answers.append(corner.client.post(path, json={"command": [MARK]}))
    )
    asking.start()
    (stream,) = wait_until(lambda: corner.sync(seen(assignment, "running")).streams)
    hears_nothing_of(thief.sync(seen(assignment, "running")), assignment)
    frames = b'{"stream": "stdout", "text": "forged"}\n{"exit_code": 0}\n'
    problem(thief.http.post(f"/agent/v1/streams/{stream.id}", content=frames), 404, "not_found")
    assert corner.node.http.post(f"/agent/v1/streams/{stream.id}", content=frames).status_code == 204
    asking.join(20)
    assert answers[0].status_code == 200


def test_a_node_takes_only_its_own_gpus_out_of_use(corner: Corner, thief: WireNode) -> None:
    incidents = [
        {"id": f"i-{gpu.uuid}", "uuid": gpu.uuid, "code": "xid_79", "message": "no"}
        for gpu in (*corner.node.gpus, *thief.gpus)
    ]
    thief.sync(incidents=incidents)
    assert {gpu["health"] for gpu in shown(corner, corner.node)["gpus"]} == {"healthy"}
    assert [gpu["health"] for gpu in shown(corner, thief)["gpus"]] == ["quarantined"]
