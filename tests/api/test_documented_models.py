"""Answers are built as plain dicts; these tests compare them with the documented models."""

from pydantic import BaseModel

from mooring_client.schemas import events, instances, nodes
from mooring_client.schemas.gpus import Sample
from tests.nodes import WireNode, observed
from tests.service import Client
from tests.testbed.waiting import wait_until


def require_conformance(client: Client, path: str, model: type[BaseModel]) -> None:
    """Fails unless the answer and the model have the same fields."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    parsed = model.model_validate(answer.json(), extra="forbid", strict=False)
    assert parsed.model_dump(mode="json").keys() == answer.json().keys()


def test_answers_conform_to_their_models(client: Client, node: WireNode) -> None:
    made = client.create(gpus={"count": 2}, ports=[{"container": 80}])
    client.create(gpus={"count": 9})
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync().assignments
    endpoint = {"container": 80, "protocol": "tcp", "host": "10.0.0.1", "port": 32768}
    sample: dict[str, object] = {
        "uuid": assignment.gpu_uuids[0],
        "index": 0,
        "sampled_at": "2026-11-21T08:00:00.000Z",
    }
    node.sync(observed(assignment, "running", endpoints=[endpoint]), samples=[sample])

    instance = f"/v1/instances/{made['id']}"
    documented: dict[str, type[BaseModel]] = {
        instance: instances.Instance,
        "/v1/instances": instances.InstanceList,
        f"{instance}/wait?state=running": instances.WaitResult,
        f"{instance}/metrics": instances.MetricsList,
        f"{instance}/events": events.InstanceEvents,
        f"{instance}/explain": instances.Explanation,
        "/v1/events": events.EventList,
        "/v1/nodes": nodes.NodeList,
        f"/v1/nodes/{node.id}": nodes.Node,
        "/v1/gpus": nodes.GpuList,
        f"/v1/gpus/{assignment.gpu_uuids[0]}": nodes.Gpu,
        f"/v1/gpus/{assignment.gpu_uuids[0]}/metrics": Sample,
        "/v1/instance-types": nodes.InstanceTypeList,
    }
    for path, model in documented.items():
        require_conformance(client, path, model)


def test_lists_and_single_reads_agree_after_every_change(client: Client, node: WireNode) -> None:
    """Lists use JSON that is cached by version: every change of an instance must change its version."""
    made = client.create(gpus={"count": 2}, ports=[{"container": 80}])
    instance = f"/v1/instances/{made['id']}"

    def same() -> bool:
        (listed,) = client.items("/v1/instances")
        return listed == client.instance(made["id"])

    def require_same() -> None:
        wait_until(same, 5)  # a scheduling cycle may run between the two answers

    require_same()
    client.wait(made["id"], "scheduled")
    require_same()
    (assignment,) = node.sync().assignments
    endpoint = {"container": 80, "protocol": "tcp", "host": "10.0.0.1", "port": 32768}
    steps: list[tuple[str, dict[str, object]]] = [
        ("starting", {"reason": {"code": "pulling_image", "message": "1 of 3 layers"}}),
        ("starting", {"reason": {"code": "pulling_image", "message": "2 of 3 layers"}}),
        ("running", {"started_at": "2026-11-21T08:00:00.000Z"}),
        ("running", {"endpoints": [endpoint]}),
        ("running", {"endpoints": [endpoint], "image_digest": "sha256:1"}),
    ]
    for phase, fields in steps:
        node.sync(observed(assignment, phase, **fields))
        require_same()
    client.patch(instance, json={"labels": {"a": "b"}, "max_duration_s": 3600, "name": "other"})
    require_same()
    client.post(f"{instance}/restart")
    require_same()
    (second,) = node.sync().assignments
    node.sync(observed(second, "running"))
    client.post(f"{instance}/stop")
    require_same()
    node.sync(observed(second, "exited", exit_code=137))
    require_same()
    node.sync()
    require_same()
    client.post(f"{instance}/start")
    require_same()
