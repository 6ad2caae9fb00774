"""Reservations of GPUs for a project and a period, over HTTP."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.concurrency import run_concurrently
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

RESERVATIONS = "/v1/reservations"


def _in(seconds: float, now: datetime | None = None) -> str:
    return ((now or datetime.now(UTC)) + timedelta(seconds=seconds)).isoformat()


class ModelNode:
    """A node with GPUs of a model that no other test uses, and a project."""

    number = 0

    def __init__(self, client: Client, gpus: int = 4) -> None:
        type(self).number += 1
        self.client = client
        self.name = f"M{self.number}"
        self.node = WireNode(client, f"model-{self.number}", gpus=gpus, model=f"NVIDIA {self.name}")
        self.node.sync()
        self.project = client.post("/v1/projects", json={"name": f"for-{self.name.lower()}"}).json()["id"]
        self.reservation_ids: list[str] = []

    def reserve(self, count: int = 2, begin: float = 0, end: float = 3600, **fields: Any) -> Any:
        now = datetime.now(UTC)
        body = {
            "name": "course", "project_id": self.project, "gpus": {"count": count, "model": self.name},
            "from": _in(begin, now), "to": _in(end, now), **fields,
        }  # fmt: skip
        answer = self.client.post(RESERVATIONS, json=body)
        if answer.status_code == 201:
            self.reservation_ids.append(answer.json()["id"])
        return answer

    def create(self, count: int = 1, **fields: Any) -> dict[str, Any]:
        return self.client.create(gpus={"count": count, "model": self.name}, **fields)

    def close(self) -> None:
        for reservation in self.reservation_ids:
            self.client.delete(f"{RESERVATIONS}/{reservation}")
        self.client.delete(f"/v1/nodes/{self.node.id}", params={"force": True})
        self.node.close()


@pytest.fixture
def model_node(shared: Client) -> Iterator[ModelNode]:
    made = ModelNode(shared)
    yield made
    made.close()


def test_reserved_gpus_are_for_the_project_only(model_node: ModelNode) -> None:
    made = model_node.reserve(3)
    assert made.status_code == 201, made.text
    reservation = made.json()
    assert (reservation["state"], reservation["missing"], reservation["awaited"]) == ("active", 0, 0)
    assert made.headers["Location"] == f"{RESERVATIONS}/{reservation['id']}"
    reserved = {device["uuid"] for device in reservation["devices"]}
    assert len(reserved) == 3
    waiting = model_node.create(2)
    wait_until(lambda: (model_node.client.instance(waiting["id"])["reason"] or {}).get("code") != "queued")
    assert model_node.client.instance(waiting["id"])["state"] == "pending"
    unreserved = model_node.client.wait(model_node.create(1)["id"], "scheduled")
    assert unreserved["devices"][0]["uuid"] not in reserved
    own = model_node.client.wait(model_node.create(3, project_id=model_node.project)["id"], "scheduled")
    assert {device["uuid"] for device in own["devices"]} == reserved


def test_a_reservation_may_exceed_the_gpus_of_one_instance(shared: Client) -> None:
    model_node = ModelNode(shared, gpus=66)
    try:
        rejected = problem(model_node.reserve(640), 409, "insufficient_capacity")
        assert (rejected["most"], rejected["earliest_at"]) == (66, None)
        made = model_node.reserve(65, begin=60)
        assert made.status_code == 201, made.text
        longer = shared.patch(f"{RESERVATIONS}/{made.json()['id']}", json={"to": _in(7200)})
        assert (longer.status_code, len(longer.json()["devices"])) == (200, 65)
    finally:
        model_node.close()


def test_reservations_at_the_maximum_datetime_work(model_node: ModelNode) -> None:
    last = "9999-12-31T23:59:59.999Z"
    assert model_node.reserve(4, to=last).json()["to"] == last
    rejected = problem(model_node.reserve(2, begin=60), 409, "insufficient_capacity")
    assert (rejected["most"], rejected["earliest_at"]) == (0, last)
    at_last: dict[str, Any] = {"from": "9999-12-31T23:59:59.998Z", "to": last}
    assert problem(model_node.reserve(1, **at_last), 409)["earliest_at"] == last
    first, second = (model_node.create(4, max_duration_s=600)["id"] for _ in range(2))
    explanations = [model_node.client.get(f"/v1/instances/{each}/explain") for each in (first, second)]
    assert [each.json()["starts_at"] for each in explanations] == [last, None]
    assert model_node.client.get("/v1/queue").status_code == 200


def test_before_a_reservation_its_gpus_run_instances_that_end_in_time(model_node: ModelNode) -> None:
    model_node.reserve(4, begin=3600, end=7200)
    endless, too_long = model_node.create(1), model_node.create(1, max_duration_s=5000)
    short = model_node.client.wait(model_node.create(4, max_duration_s=600)["id"], "scheduled")
    assert len(short["devices"]) == 4
    assert {model_node.client.instance(each["id"])["state"] for each in (endless, too_long)} == {"pending"}


def test_running_instances_delay_a_reservation_until_their_declared_end(model_node: ModelNode) -> None:
    model_node.client.wait(model_node.create(3)["id"], "scheduled")
    rejected = problem(model_node.reserve(2), 409, "insufficient_capacity")
    assert (rejected["most"], rejected["earliest_at"]) == (1, None)
    model_node.client.wait(model_node.create(1, max_duration_s=600)["id"], "scheduled")
    rejected = problem(model_node.reserve(1), 409, "insufficient_capacity")
    assert rejected["most"] == 0
    earliest = datetime.fromisoformat(rejected["earliest_at"])
    assert timedelta(seconds=590) < earliest - datetime.now(UTC) < timedelta(seconds=700)
    assert model_node.reserve(1, begin=700, end=7200).status_code == 201


def test_an_instance_on_reserved_gpus_cannot_extend_its_duration(model_node: ModelNode) -> None:
    running = model_node.client.wait(model_node.create(4, max_duration_s=600)["id"], "scheduled")
    assert model_node.reserve(4, begin=1000, end=7200).status_code == 201
    path = f"/v1/instances/{running['id']}"
    assert model_node.client.patch(path, json={"max_duration_s": 900}).status_code == 200
    for longer in (5000, None):
        rejected = problem(
            model_node.client.patch(path, json={"max_duration_s": longer}), 409, "gpu_reserved"
        )
        assert rejected["reserved_from"] > running["created_at"]
    assert model_node.client.instance(running["id"])["max_duration_s"] == 900
    assert model_node.client.post(f"{path}/restart").status_code == 202
    assert model_node.client.patch(path, json={"max_duration_s": 10}).status_code == 200
    own = model_node.client.create(project_id=model_node.project, gpus={"count": 4, "model": model_node.name})
    model_node.client.delete(path)
    for _ in range(2):
        model_node.node.sync()
    model_node.client.wait(own["id"], "scheduled")
    assert model_node.client.post(f"/v1/instances/{own['id']}/restart").status_code == 202


def test_overlapping_reservations_use_different_gpus(model_node: ModelNode) -> None:
    first = model_node.reserve(3, begin=3600, end=7200).json()
    rejected = problem(model_node.reserve(2, begin=5000, end=9000), 409, "insufficient_capacity")
    assert rejected["most"] == 1
    assert rejected["earliest_at"] == first["to"]
    assert model_node.reserve(2, begin=7200, end=9000).status_code == 201
    second = model_node.reserve(1, begin=3600, end=7200).json()
    shown = [first, second]
    assert len({device["uuid"] for each in shown for device in each["devices"]}) == 4


def test_a_reservation_can_be_extended_shortened_and_deleted(model_node: ModelNode) -> None:
    made = model_node.reserve(2, begin=3600, end=7200).json()
    path = f"{RESERVATIONS}/{made['id']}"
    longer = model_node.client.patch(
        path, json={"to": _in(9000), "name": "seminar"}, headers={"If-Match": '"1"'}
    )
    assert (longer.status_code, longer.json()["name"], longer.json()["version"]) == (200, "seminar", 2)
    assert longer.json()["devices"] == made["devices"]
    problem(model_node.client.patch(path, json={"name": "x"}, headers={"If-Match": '"1"'}), 412)
    model_node.reserve(4, begin=9000, end=10_000)
    rejected = problem(model_node.client.patch(path, json={"to": _in(9600)}), 409, "insufficient_capacity")
    assert rejected["most"] == 0
    assert model_node.client.get(path).json()["to"] == longer.json()["to"]
    assert model_node.client.patch(path, json={"to": _in(4000)}).status_code == 200
    problem(model_node.client.patch(path, json={"to": _in(60)}), 422, "bad_period")
    waiting = model_node.create(4, max_duration_s=5000)
    assert model_node.client.delete(path).status_code == 204
    problem(model_node.client.get(path), 404, "not_found")
    assert model_node.client.wait(waiting["id"], "scheduled")["state"] == "scheduled"


def test_failed_gpus_of_a_reservation_are_replaced(model_node: ModelNode) -> None:
    made = model_node.reserve(2, begin=3600, end=7200).json()
    path = f"{RESERVATIONS}/{made['id']}"
    lost = made["devices"][0]["uuid"]
    model_node.node.sync(
        incidents=[{"id": "i1", "uuid": lost, "code": "xid_79", "message": "fell off the bus"}]
    )
    repaired = wait_until(
        lambda: found if (found := model_node.client.get(path).json())["missing"] == 0 else None, timeout_s=20
    )
    assert lost not in {device["uuid"] for device in repaired["devices"]}
    assert made["devices"][1] in repaired["devices"]
    assert repaired["version"] == 2


def test_missing_gpus_of_a_reservation_are_counted(model_node: ModelNode) -> None:
    made = model_node.reserve(4, begin=3600, end=7200).json()
    lost = made["devices"][0]["uuid"]
    model_node.node.sync(incidents=[{"id": "i1", "uuid": lost, "code": "xid_79", "message": "gone"}])
    shown = model_node.client.get(f"{RESERVATIONS}/{made['id']}").json()
    assert (shown["missing"], len(shown["devices"])) == (1, 4)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"begin": 60, "end": 60}, "bad_period"),
        ({"begin": 60, "end": 30}, "bad_period"),
        ({"begin": -60, "end": -30}, "bad_period"),
        ({"to": "2099-01-01"}, "datetime_format"),
        ({"gpus": {"count": 0}}, "greater_than_equal"),
        ({"gpus": {"count": 1, "share": 0.5}}, "unknown_field"),
    ],
)
def test_an_invalid_reservation_is_rejected(model_node: ModelNode, fields: dict[str, Any], code: str) -> None:
    rejected = problem(model_node.reserve(**fields), 422)
    assert code in {rejected["code"], *(each["code"] for each in rejected.get("errors", ()))}


def test_alternative_models_are_tried_in_order(model_node: ModelNode) -> None:
    gpus = {"count": 4, "model": ["NoSuchModel", model_node.name]}
    made = model_node.reserve(gpus=gpus)
    assert made.status_code == 201, made.text
    assert {device["model"] for device in made.json()["devices"]} == {f"NVIDIA {model_node.name}"}
    assert made.json()["gpus"]["model"] == gpus["model"]


def test_a_repeated_request_creates_no_second_reservation(model_node: ModelNode) -> None:
    body = {
        "name": "r", "project_id": model_node.project, "gpus": {"count": 2, "model": model_node.name},
        "to": "2099-01-01T00:00:00Z",
    }  # fmt: skip
    first, again = (
        model_node.client.post(RESERVATIONS, json=body, headers={"Idempotency-Key": f"r-{model_node.name}"})
        for _ in range(2)
    )
    model_node.reservation_ids.append(first.json()["id"])
    assert first.content == again.content
    assert [each["id"] for each in model_node.client.items(RESERVATIONS, project_id=model_node.project)] == [
        first.json()["id"]
    ]


@pytest.mark.both_databases
def test_concurrent_reservations_never_get_the_same_gpu(model_node: ModelNode) -> None:
    answers = run_concurrently(4, lambda _number: model_node.reserve(2))
    made = [answer.json() for answer in answers if answer.status_code == 201]
    assert sorted(answer.status_code for answer in answers) == [201, 201, 409, 409]
    assert len({device["uuid"] for each in made for device in each["devices"]}) == 4


def test_gpus_of_a_deleted_node_are_replaced(model_node: ModelNode) -> None:
    made = model_node.reserve(2, begin=3600, end=7200).json()
    spare = WireNode(
        model_node.client, f"{model_node.node.name}-spare", gpus=2, model=f"NVIDIA {model_node.name}"
    )
    spare.sync()
    path = f"{RESERVATIONS}/{made['id']}"
    try:
        model_node.client.delete(f"/v1/nodes/{model_node.node.id}", params={"force": True})
        repaired = wait_until(
            lambda: found if (found := model_node.client.get(path).json())["version"] == 2 else None,
            timeout_s=20,
        )
        assert repaired["missing"] == 0
        assert {device["node_id"] for device in repaired["devices"]} == {spare.id}
    finally:
        model_node.client.delete(f"/v1/nodes/{spare.id}", params={"force": True})
        spare.close()


def test_deleting_a_project_deletes_its_reservations(model_node: ModelNode) -> None:
    made = model_node.reserve(4).json()
    waiting = model_node.create(4, max_duration_s=600)
    assert model_node.client.delete(f"/v1/projects/{model_node.project}").status_code == 204
    assert model_node.client.get(f"{RESERVATIONS}/{made['id']}").status_code == 404
    model_node.client.wait(waiting["id"], "scheduled")
