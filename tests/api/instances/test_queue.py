"""The queue over HTTP: order, visibility and positions."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from mooring.scheduler import queue_order
from mooring_client.schemas import queue as schemas
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import make_key
from tests.testbed.waiting import wait_until

BUSY = {"gpus": {"count": 8}, "max_duration_s": 3600}


@pytest.fixture
def busy(client: Client, node: WireNode) -> dict[str, Any]:
    """An instance that uses all eight GPUs of the only node for an hour."""
    return client.wait(client.create(name="busy", **BUSY)["id"], "scheduled")


@pytest.fixture
def other(client: Client) -> Iterator[Client]:
    """A member of another project."""
    project = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    key = make_key(client, project_id=project, role="member")["key"]
    with Client(str(client.base_url), key=key) as made:
        yield made


def _wait_for_reason(client: Client, instance_id: str) -> dict[str, Any]:
    """Wait until the scheduler has set the instance's reason; return the instance."""

    def considered() -> dict[str, Any] | None:
        shown = client.instance(instance_id)
        return shown if shown["reason"] and shown["reason"]["code"] != "queued" else None

    return wait_until(considered)


def _queue(client: Client, **params: Any) -> dict[str, Any]:
    answer = client.get("/v1/queue", params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_queue_lists_order_and_reasons(client: Client, busy: dict[str, Any]) -> None:
    made = [
        client.create(name=name, priority=priority, gpus={"count": 2})
        for name, priority in (("first", 50), ("second", 50), ("urgent", 90))
    ]
    for each in made:
        _wait_for_reason(client, each["id"])
    listed = _queue(client)["items"]
    assert [each["name"] for each in listed] == ["urgent", "first", "second"]
    assert [each["position"] for each in listed] == [1, 2, 3]
    assert [each["behind"] for each in listed] == [None, "priority", "age"]
    assert {(each["count"], each["gpus"]) for each in listed} == {(1, 2.0)}
    assert listed[0]["reason"]["code"] == "waiting_for_capacity"
    starts = wait_until(lambda: _queue(client)["items"][0]["starts_at"])
    assert starts > busy["created_at"]


def test_a_group_is_one_entry(client: Client, busy: dict[str, Any]) -> None:
    group = client.post(
        "/v1/instance-groups",
        json={"name": "train", "count": 3, "template": {"image": "b", "gpus": {"count": 2}}},
    ).json()
    after = client.create(name="after", gpus={"count": 8})
    _wait_for_reason(client, after["id"])
    entries = _queue(client)["items"]
    assert [(each["name"], each["count"], each["gpus"], each["position"]) for each in entries] == [
        ("train", 3, 6.0, 1),
        ("after", 1, 8.0, 4),
    ]
    assert (entries[0]["group_id"], entries[0]["instance_id"]) == (group["id"], None)


def test_entries_of_other_projects_show_no_names_labels_and_ids(
    client: Client, other: Client, busy: dict[str, Any]
) -> None:
    fields = {"gpus": {"count": 4}, "labels": {"hidden": "hidden"}}
    hidden = [client.create(name=f"hidden-{number}", **fields) for number in (1, 2)]
    _wait_for_reason(client, hidden[1]["id"])
    visible = other.create(name="visible", gpus={"count": 1})
    _wait_for_reason(client, visible["id"])
    listed = other.get("/v1/queue")
    assert "hidden" not in listed.text
    assert hidden[0]["project_id"] not in listed.text
    assert busy["id"] not in listed.text
    # The other project uses nothing: fair share puts its instance before all that have no backfill slot.
    assert [(each["name"], each["gpus"], each["behind"]) for each in listed.json()["items"]] == [
        (None, 4.0, None),
        ("visible", 1.0, "promised"),
        (None, 4.0, "fair_share"),
    ]
    (share,) = listed.json()["shares"]
    assert (share["project_id"], share["gpus"], share["dominant_share"]) == (visible["project_id"], 0.0, 0.0)
    shares = {each["project_id"]: each for each in _queue(client)["shares"]}
    assert shares[hidden[0]["project_id"]]["dominant_share"] == 1.0
    assert shares[hidden[0]["project_id"]]["gpus"] == 8.0


def test_the_documented_order_rules_are_the_schedulers() -> None:
    assert get_args(schemas.Because) == get_args(queue_order.Because)


def test_the_queue_is_paged(client: Client, busy: dict[str, Any]) -> None:
    made = [client.create(gpus={"count": 8})["id"] for _ in range(5)]
    for each in made:
        _wait_for_reason(client, each)
    found: list[str] = []
    cursor = None
    while True:
        page = _queue(client, limit=2, **({"cursor": cursor} if cursor else {}))
        found += [each["instance_id"] for each in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == made
    problem(client.get("/v1/queue", params={"cursor": "made-up"}), 400, "bad_cursor")
    instances = client.get("/v1/instances", params={"limit": 1}).json()["next_cursor"]
    problem(client.get("/v1/queue", params={"cursor": instances}), 400, "bad_cursor")


def test_explain_shows_the_position_and_what_the_start_depends_on(
    client: Client, busy: dict[str, Any]
) -> None:
    ahead = client.create(name="ahead", gpus={"count": 8}, max_duration_s=600)
    waiting = client.create(name="waits", gpus={"count": 4})
    _wait_for_reason(client, waiting["id"])
    explained = client.get(f"/v1/instances/{waiting['id']}/explain").json()
    assert (explained["state"], explained["queue_position"]) == ("pending", 2)
    assert explained["ahead"] == [
        {"instance_id": ahead["id"], "group_id": None, "name": "ahead", "because": "promised"}
    ]
    assert explained["starts_at"] > client.get(f"/v1/instances/{ahead['id']}/explain").json()["starts_at"]
    assert explained["start_node_ids"] == [busy["node_id"]]
    first = client.get(f"/v1/instances/{ahead['id']}/explain").json()
    assert [each["instance_id"] for each in first["waits_for"]] == [busy["id"]]
    assert first["waits_for"][0]["name"] == "busy"
    assert first["waits_for"][0]["ends_at"] is not None
    assert first["waits_for_others"] == 0


def test_explain_counts_instances_of_other_projects_without_naming_them(
    client: Client, other: Client, busy: dict[str, Any]
) -> None:
    first = client.create(name="hidden", priority=90, gpus={"count": 8}, max_duration_s=60)
    waiting = other.create(name="waits", gpus={"count": 4})
    _wait_for_reason(client, waiting["id"])
    explained = other.get(f"/v1/instances/{waiting['id']}/explain")
    assert [trace for trace in (busy["id"], first["id"], "hidden") if trace in explained.text] == []
    assert explained.json()["ahead"] == [
        {"instance_id": None, "group_id": None, "name": None, "because": "priority"}
    ]
    client.delete(f"/v1/instances/{first['id']}")
    explained = other.get(f"/v1/instances/{waiting['id']}/explain")
    assert (explained.json()["waits_for"], explained.json()["waits_for_others"]) == ([], 1)


def test_explain_shows_what_would_start_now(client: Client, node: WireNode) -> None:
    client.wait(client.create(gpus={"count": 6}, max_duration_s=3600)["id"], "scheduled")
    head = client.create(name="head", gpus={"count": 8}, max_duration_s=600)
    _wait_for_reason(client, head["id"])
    behind = client.create(name="behind", gpus={"count": 2})
    assert _wait_for_reason(client, behind["id"])["reason"]["code"] == "waiting_for_turn"
    fits = client.get(f"/v1/instances/{behind['id']}/explain").json()["would_fit"]
    assert 3000 < fits["max_duration_s"] < 3600
    short = client.create(name="short", gpus={"count": 2}, max_duration_s=fits["max_duration_s"] - 60)
    assert client.wait(short["id"], "scheduled")["state"] == "scheduled"
    fits = client.get(f"/v1/instances/{head['id']}/explain").json()["would_fit"]
    assert fits["max_count_now"] == 0


def test_a_dry_run_lists_what_it_would_wait_for(client: Client, busy: dict[str, Any]) -> None:
    body = {"image": "b", "gpus": {"count": 2}}
    outcome = client.post("/v1/instances?dry_run=true", json=body).json()
    assert (outcome["placeable"], outcome["reason"]["code"], outcome["queue_position"]) == (
        False, "waiting_for_capacity", 1,
    )  # fmt: skip
    assert outcome["starts_at"] is not None
    assert [each["name"] for each in outcome["waits_for"]] == ["busy"]
    assert _queue(client)["items"] == []


def test_a_group_is_explained_as_a_whole(client: Client, busy: dict[str, Any]) -> None:
    group = client.post(
        "/v1/instance-groups", json={"count": 2, "template": {"image": "b", "gpus": {"count": 4}}}
    ).json()
    path = f"/v1/instance-groups/{group['id']}"
    wait_until(lambda: client.get(path).json()["reason"]["code"] != "queued")
    explained = client.get(f"{path}/explain").json()
    assert (explained["state"], explained["queue_position"]) == ("pending", 1)
    assert explained["starts_at"] is not None
    assert "insufficient_gpus" in {refusal["code"] for refusal in explained["refusals"]}
    problem(client.get("/v1/instance-groups/none/explain"), 404, "not_found")


def test_fragmentation_counts_what_fits_and_stranded_gpus(client: Client, node: WireNode) -> None:
    client.wait(client.create(gpus={"count": 3})["id"], "scheduled")
    node.sync(
        instances=None,
        incidents=[{"id": "i", "uuid": node.gpus[7].uuid, "code": "xid_79", "message": "gone"}],
    )
    (listed,) = client.items("/v1/cluster/fragmentation")
    assert (listed["model"], listed["gpus"], listed["gpus_free"], listed["share_free"]) == (
        node.gpus[0].model, 8, 5, 5.0,
    )  # fmt: skip
    assert {each["count"]: each["instances"] for each in listed["fits"]} == {1: 4, 2: 2, 4: 1, 8: 0}
    assert listed["stranded"] == [{"by": "quarantined", "gpus": 1.0}]


@pytest.mark.parametrize(
    ("allowed", "fields", "code"),
    [
        ({"gpu_sharing": True}, {"gpus": {"share": 0.5}}, "gpu_sharing_not_allowed"),
        ({"max_priority": 70}, {"priority": 70}, "priority_not_allowed"),
    ],
)
def test_sharing_and_high_priorities_need_an_admins_permission(
    client: Client, other: Client, allowed: dict[str, Any], fields: dict[str, Any], code: str
) -> None:
    project = other.get("/v1/me").json()["project"]["id"]
    path = f"/v1/projects/{project}"
    client.patch(path, json={"max_priority": 10})
    body = {"image": "b", "priority": 10, **fields}
    for url in ("/v1/instances", "/v1/instances?dry_run=true"):
        problem(other.post(url, json=body), 403, code)
    group = {"count": 1, "template": body}
    problem(other.post("/v1/instance-groups", json=group), 403, code)
    shown = client.patch(path, json=allowed).json()
    assert shown.items() >= allowed.items()
    assert other.post("/v1/instances", json=body).status_code == 201
    assert other.post("/v1/instance-groups", json=group).status_code == 201
