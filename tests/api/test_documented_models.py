"""Answers are made as plain dicts; here they are held against the models that document them."""

from pydantic import BaseModel

from mooring.core.gpu import Sample
from mooring.schemas import events, instances, nodes
from tests.nodes import WireNode, observed
from tests.service import Client
from tests.testbed.waiting import wait_until


def conforms(client: Client, path: str, model: type[BaseModel]) -> None:
    """Every member of the answer is in the model and every member of the model is in the answer."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    read = model.model_validate(answer.json(), extra="forbid", strict=False)
    assert read.model_dump(mode="json").keys() == answer.json().keys()


def test_every_answer_is_what_its_model_says(client: Client, node: WireNode) -> None:
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

    one = f"/v1/instances/{made['id']}"
    documented: dict[str, type[BaseModel]] = {
        one: instances.Instance,
        "/v1/instances": instances.InstanceList,
        f"{one}/wait?state=running": instances.WaitResult,
        f"{one}/metrics": instances.MetricsList,
        f"{one}/events": events.InstanceEvents,
        f"{one}/explain": instances.Explanation,
        "/v1/events": events.EventList,
        "/v1/nodes": nodes.NodeList,
        f"/v1/nodes/{node.id}": nodes.Node,
        "/v1/gpus": nodes.GpuList,
        f"/v1/gpus/{assignment.gpu_uuids[0]}": nodes.Gpu,
        f"/v1/gpus/{assignment.gpu_uuids[0]}/metrics": Sample,
        "/v1/instance-types": nodes.InstanceTypeList,
    }
    for path, model in documented.items():
        conforms(client, path, model)


def test_lists_show_what_gets_show_at_every_step(client: Client, node: WireNode) -> None:
    """Lists are made of texts kept by version: whatever changes an instance must change its version."""
    made = client.create(gpus={"count": 2}, ports=[{"container": 80}])
    one = f"/v1/instances/{made['id']}"

    def same() -> bool:
        (listed,) = client.items("/v1/instances")
        return listed == client.instance(made["id"])

    def agree() -> None:
        wait_until(same, 5)  # between the two answers the scheduler may have had a look

    agree()
    client.wait(made["id"], "scheduled")
    agree()
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
        agree()
    client.patch(one, json={"labels": {"a": "b"}, "max_duration_s": 3600, "name": "other"})
    agree()
    client.post(f"{one}/restart")
    agree()
    (second,) = node.sync().assignments
    node.sync(observed(second, "running"))
    client.post(f"{one}/stop")
    agree()
    node.sync(observed(second, "exited", exit_code=137))
    agree()
    node.sync()
    agree()
    client.post(f"{one}/start")
    agree()
