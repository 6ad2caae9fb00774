"""Isolation of tenants: one tenant cannot read data of another."""

import json
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest

from mooring_client.schemas.projects import Role
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client
from tests.tenancy.calls import WEBHOOK_URL
from tests.tenancy.tenants import IMAGE, NOWHERE, Setup, make_key, post
from tests.testbed.waiting import wait_until

_years = count(3000)  # a separate year for each reservation
INSTANCE_REQUESTS = {
    "GET": ("", "/wait?timeout_s=1", "/logs", "/metrics", "/events", "/explain"),
    "POST": ("/stop", "/start", "/restart", "/exec"),
    "PATCH": ("",),
    "DELETE": ("",),
}
BODIES = {"/exec": {"command": ["id"]}, "PATCH": {"labels": {}}}


def _require_same_as_unknown(answer: httpx.Response, unknown: httpx.Response, own: str, other: str) -> None:
    """Fails unless both answers are the same 404, which does not reveal which ID exists."""
    actual, expected = problem(answer, 404, "not_found"), problem(unknown, 404, "not_found")
    for document in (actual, expected):
        del document["request_id"]
    assert json.dumps(actual).replace(own, other) == json.dumps(expected)


@pytest.mark.parametrize(
    ("method", "suffix"),
    [(method, suffix) for method, all_of in INSTANCE_REQUESTS.items() for suffix in all_of],
)
def test_an_instance_of_another_project_looks_unknown(setup: Setup, method: str, suffix: str) -> None:
    unknown = f"{setup.running[:-6]}000000"
    for other_client in (setup.b.member, setup.b.owner):
        body = BODIES.get(suffix) or BODIES.get(method)
        answers = [
            other_client.request(method, f"/v1/instances/{instance_id}{suffix}", json=body)
            for instance_id in (setup.running, unknown)
        ]
        _require_same_as_unknown(answers[0], answers[1], setup.running, unknown)
    assert setup.admin.instance(setup.running)["state"] == "running"


@pytest.mark.parametrize("suffix", ["", "/members"])
def test_another_project_looks_unknown(setup: Setup, suffix: str) -> None:
    unknown = f"{setup.a.id[:-6]}000000"
    answers = [
        setup.b.owner.get(f"/v1/projects/{project_id}{suffix}") for project_id in (setup.a.id, unknown)
    ]
    _require_same_as_unknown(answers[0], answers[1], setup.a.id, unknown)


def test_a_group_of_another_project_looks_unknown(setup: Setup) -> None:
    body = {"count": 2, "template": {"image": IMAGE, "node_selector": NOWHERE}}
    group = post(setup.a.member, "/v1/instance-groups", **body)["id"]
    unknown = f"{group[:-6]}000000"
    for method, suffix in (
        ("GET", ""), ("GET", "/explain"), ("POST", "/stop"), ("POST", "/start"), ("DELETE", ""),
    ):  # fmt: skip
        answers = [
            setup.b.owner.request(method, f"/v1/instance-groups/{group_id}{suffix}")
            for group_id in (group, unknown)
        ]
        _require_same_as_unknown(answers[0], answers[1], group, unknown)
    assert setup.admin.get(f"/v1/instance-groups/{group}").json()["state"] == "pending"


def test_a_reservation_of_another_project_looks_unknown(setup: Setup) -> None:
    made = post(
        setup.admin, "/v1/reservations", name="alphas", project_id=setup.a.id, gpus={"count": 1},
        **{"from": "2098-01-01T00:00:00Z", "to": "2098-01-02T00:00:00Z"},
    )["id"]  # fmt: skip
    assert setup.a.viewer.get(f"/v1/reservations/{made}").status_code == 200
    unknown = f"{made[:-6]}000000"
    answers = [setup.b.owner.get(f"/v1/reservations/{each}") for each in (made, unknown)]
    _require_same_as_unknown(answers[0], answers[1], made, unknown)
    problem(setup.a.owner.delete(f"/v1/reservations/{made}"), 403, "forbidden")


@pytest.mark.parametrize(
    "path",
    ["/v1/instances", "/v1/instance-groups", "/v1/api-keys", "/v1/secrets", "/v1/registries", "/v1/webhooks"],
)
def test_nothing_is_created_in_another_project(setup: Setup, path: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/instances": {"image": IMAGE},
        "/v1/instance-groups": {"count": 1, "template": {"image": IMAGE}},
        "/v1/api-keys": {"name": "k", "role": "viewer"},
        "/v1/secrets": {"name": "token", "value": "x"},
        "/v1/registries": {"server": "ghcr.io", "username": "u", "password": "x"},
        "/v1/webhooks": {"url": "https://receiver.example/"},
    }
    unknown = f"{setup.a.id[:-6]}000000"
    for dry_run in ("", "?dry_run=true") if path == "/v1/instances" else ("",):
        answers = [
            setup.b.owner.post(f"{path}{dry_run}", json={**bodies[path], "project_id": project_id})
            for project_id in (setup.a.id, unknown)
        ]
        _require_same_as_unknown(answers[0], answers[1], setup.a.id, unknown)
        problem(setup.admin.post(path, json={**bodies[path], "project_id": unknown}), 404, "not_found")


@pytest.mark.parametrize(
    "filters",
    [
        lambda setup: {"project_id": setup.a.id},
        lambda setup: {"node_id": setup.working.id},
        lambda setup: {"name": "a-waits"},
        lambda setup: {"label": "of:alpha"},
        lambda setup: {"state": "running"},
        lambda _setup: {},
    ],
    ids=["project_id", "node_id", "name", "label", "state", "none"],
)
def test_filters_find_only_the_callers_instances(setup: Setup, filters: Callable[[Setup], Any]) -> None:
    query = filters(setup)
    assert setup.a.viewer.items("/v1/instances", **query) != []
    found = setup.b.owner.items("/v1/instances", **query)
    assert [item for item in found if item["project_id"] != setup.b.id] == []


@pytest.mark.parametrize(
    "path", ["/v1/api-keys", "/v1/secrets", "/v1/registries", "/v1/audit-log", "/v1/instance-groups",
             "/v1/reservations", "/v1/webhooks"]
)  # fmt: skip
def test_lists_show_only_the_callers_resources(setup: Setup, path: str) -> None:
    post(setup.a.owner, "/v1/secrets", name=f"of-{path.rsplit('/', 1)[-1]}", value="x")
    server = f"{path.rsplit('/', 1)[-1]}.example"
    post(setup.a.owner, "/v1/registries", server=server, username="u", password="x")
    if path == "/v1/webhooks":
        post(setup.a.owner, path, url=WEBHOOK_URL)
    template = {"image": IMAGE, "node_selector": NOWHERE}
    post(setup.a.owner, "/v1/instance-groups", count=1, template=template)
    post(
        setup.admin, "/v1/reservations", name="a", project_id=setup.a.id, gpus={"count": 1},
        **{"from": f"{next(_years)}-01-01T00:00:00Z", "to": f"{next(_years)}-01-01T00:00:00Z"},
    )  # fmt: skip
    assert setup.a.owner.items(path, project_id=setup.a.id) != []
    assert setup.b.owner.items(path, project_id=setup.a.id) == []
    assert {item["project_id"] for item in setup.b.owner.items(path, limit=200)} <= {setup.b.id}
    assert [item["id"] for item in setup.b.owner.items("/v1/projects")] == [setup.b.id]


def test_a_cursor_shows_only_the_callers_list(setup: Setup) -> None:
    of_b = setup.pending_instance(setup.b.member)
    of_a = [setup.pending_instance() for _ in range(3)]
    page = setup.a.owner.get("/v1/instances", params={"limit": 1}).json()
    assert page["items"][0]["id"] == of_a[-1]
    shown = setup.b.owner.get("/v1/instances", params={"cursor": page["next_cursor"]}).json()
    assert of_b in {item["id"] for item in shown["items"]}
    assert {item["project_id"] for item in shown["items"]} == {setup.b.id}


def test_idempotency_keys_are_separate_per_caller(setup: Setup) -> None:
    body = {"image": IMAGE, "node_selector": NOWHERE}
    headers = {"Idempotency-Key": "the-same-for-both"}
    made = [
        client.post("/v1/instances", json=body, headers=headers)
        for client in (setup.a.member, setup.b.member)
    ]
    again = setup.b.member.post("/v1/instances", json=body, headers=headers)
    assert [answer.status_code for answer in made] == [201, 201]
    assert [answer.json()["project_id"] for answer in made] == [setup.a.id, setup.b.id]
    assert again.content == made[1].content
    # Another body with the same key does not conflict with another caller's request.
    other = setup.b.owner.post("/v1/instances", json={**body, "labels": {"a": "b"}}, headers=headers)
    assert other.status_code == 201


def _all_events(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := client.items("/v1/events", after=found[-1]["seq"] if found else 0, limit=200):
        found += page
    return found


def test_events_are_those_of_the_callers_project_without_nodes(setup: Setup) -> None:
    of_b = setup.pending_instance(setup.b.member)
    of_a = {item["id"] for item in setup.a.owner.items("/v1/instances", limit=200)}
    events = _all_events(setup.b.viewer)
    assert of_b in {event["data"].get("instance_id") for event in events}
    assert {event["type"] for event in events} == {"instance.state_changed"}
    assert of_a.isdisjoint(event["data"]["instance_id"] for event in events)
    assert {event["type"] for event in _all_events(setup.admin)} > {"instance.state_changed"}
    assert setup.b.viewer.items("/v1/events", after=events[-1]["seq"]) == []


def test_an_event_stream_has_only_the_callers_events(setup: Setup) -> None:
    newest = _all_events(setup.admin)[-1]["seq"]
    received: list[str] = []
    opened = threading.Event()

    def follow() -> None:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(newest)}
        with setup.b.viewer.stream("GET", "/v1/events", headers=headers) as answer:
            opened.set()
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    received.append(line)
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert opened.wait(10)
    of_a, of_b = setup.pending_instance(), setup.pending_instance(setup.b.member)
    thread.join(20)
    assert len(received) == 1
    assert (of_a in received[0], of_b in received[0]) == (False, True)


def test_nodes_and_gpus_do_not_show_instances_of_other_projects(setup: Setup) -> None:
    gpu = f"/v1/gpus/{setup.gpu}"
    assert setup.a.viewer.get(gpu).json()["instance_id"] == setup.running
    assert setup.b.owner.get(gpu).json()["instance_id"] is None
    problem(setup.b.owner.get(f"{gpu}/metrics"), 403, "forbidden")
    assert setup.a.viewer.get(f"{gpu}/metrics").json()["uuid"] == setup.gpu
    for client, holder in ((setup.a.viewer, setup.running), (setup.b.owner, None)):
        node = client.get(f"/v1/nodes/{setup.working.id}").json()
        assert next(item for item in node["gpus"] if item["uuid"] == setup.gpu)["instance_id"] == holder
        assert holder in {item["instance_id"] for item in client.items("/v1/gpus", node_id=setup.working.id)}


def test_orphan_containers_are_visible_to_admins_only(setup: Setup) -> None:
    setup.wire.sync(
        orphans=[
            {
                "container_id": "c1",
                "name": "alphas-own",
                "instance_id": setup.running,
                "control_plane_id": "cpl_other",
            }
        ]
    )
    path = f"/v1/nodes/{setup.wire.id}"
    assert setup.admin.get(path).json()["orphans"] != []
    for client in (setup.a.owner, setup.b.owner):
        assert client.get(path).json()["orphans"] == []
    setup.wire.sync()


def _readable_paths(setup: Setup) -> list[str]:
    """Paths of all GET operations without IDs, or with IDs that every caller may see."""
    document: dict[str, Any] = setup.admin.get("/openapi.json").json()
    known = {"node_id": setup.working.id, "uuid": setup.gpu, "project_id": setup.b.id}
    quarantined = {**known, "node_id": setup.wire.id, "uuid": setup.wire.gpus[0].uuid}
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    return [
        path.format(**each)
        for each in (known, quarantined)
        for path in paths
        if not path.startswith("/metrics")
        and ("{" not in path or any(f"{{{name}}}" in path for name in known))
    ]


def _quarantine_a_gpu_of_a(setup: Setup) -> None:
    """Quarantine a GPU with incidents about an instance of A: leftover processes and a fault."""
    made = setup.a.member.create(name="alphas-last", node_selector={"sandbox": "wire"}, gpus={"count": 1})
    setup.admin.wait(made["id"], "scheduled")
    received = setup.wire.sync(instances=None)
    assignment = next(each for each in received.assignments if each.instance_id == made["id"])
    # The tests below expect the node's first GPU.
    (uuid,) = assignment.gpu_uuids
    assert uuid == setup.wire.gpus[0].uuid
    incident = {"uuid": uuid, "message": "processes are still on it: 47114711 (/home/alphas-program)"}
    setup.wire.sync(
        observed(assignment, "exited", exit_code=0),
        samples=[{"uuid": uuid, "index": 0, "sampled_at": "2026-11-22T08:00:00Z"}],
        incidents=[{**incident, "id": "left", "code": "gpu_not_released"}],
        faults=[{**incident, "id": "fault", "code": "xid_31", "count": 47114711}],
    )


def test_no_answer_contains_data_of_another_tenant(setup: Setup) -> None:
    """Looks for distinctive values of A in everything that B's owner can read."""
    _quarantine_a_gpu_of_a(setup)
    setup.a.member.create(
        name="alphas-work", image="alpha.example/alphas-image:1", labels={"alphas-label": "alphas-value"},
        env={"ALPHAS": "alphas-env"}, command=["alphas-command"], gpus={"count": 64}, priority=90,
    )  # fmt: skip
    of_a = {"alpha", "47114711", setup.a.id, setup.running, setup.pending}
    of_a |= {user.id for user in setup.a.people.values()} | {setup.a.service["id"]}
    of_a |= {user.key["prefix"] for user in setup.a.people.values()}
    waiting = setup.b.member.create(name="betas-work", gpus={"count": 64}, on_capacity="queue")
    # B's instance waits behind A's; answers to B show that another one is ahead, but not which.
    assert wait_until(lambda: setup.b.owner.instance(waiting["id"])["queue_position"]) >= 2
    paths = [
        *_readable_paths(setup),
        *(f"/v1/instances/{waiting['id']}{suffix}" for suffix in ("", "/explain", "/events")),
    ]
    assert len(paths) > 20
    for path in paths:
        answer = setup.b.owner.get(
            path, params={"email": "viewer@beta.example"} if path == "/v1/users" else {}
        )
        is_off = answer.status_code == 409 and answer.json()["code"] == "docker_off"
        assert answer.status_code in {200, 403} or is_off, (path, answer.text)
        assert [value for value in of_a if value in answer.text.replace(setup.service.url, "")] == [], path
    dry_run = setup.b.owner.post("/v1/instances?dry_run=true", json={"image": IMAGE, "gpus": {"count": 4}})
    rejected = setup.b.owner.post(
        "/v1/instances", json={"image": IMAGE, "gpus": {"count": 4, "model": "H100"}, "on_capacity": "fail",
                               "node_selector": {"sandbox": "working"}}
    )  # fmt: skip
    assert (dry_run.status_code, rejected.status_code) == (200, 409)
    assert [value for value in of_a if value in dry_run.text + rejected.text] == []
    # A's own members do see these values.
    for path in (f"/v1/gpus/{setup.wire.gpus[0].uuid}", f"/v1/gpus/{setup.wire.gpus[0].uuid}/incidents"):
        assert "alphas-program" in setup.a.viewer.get(path).text
        assert "gpu_not_released" in setup.b.viewer.get(path).text
    assert "alphas-program" in setup.a.owner.get("/v1/events", params={"limit": 200}).text
    setup.admin.post(f"/v1/gpus/{setup.wire.gpus[0].uuid}/clear")
    assert "alphas-work" in setup.a.owner.get("/v1/instances").text
    setup.b.member.delete(f"/v1/instances/{waiting['id']}")


def test_two_projects_may_use_the_same_name(setup: Setup) -> None:
    for client in (setup.a.member, setup.b.member):
        assert client.create(name="the-same", node_selector=NOWHERE)["name"] == "the-same"
    taken = setup.a.member.post("/v1/instances", json={"image": IMAGE, "name": "the-same"})
    problem(taken, 409, "name_taken")
    for client in (setup.a.member, setup.b.member):
        post(client, "/v1/secrets", name="the-same", value="x")


def test_metrics_of_the_service_need_their_own_scope(setup: Setup) -> None:
    reader = make_key(setup.admin, scopes=["metrics:read"])
    with Client(setup.service.url, key=reader["key"]) as prometheus:
        assert "mooring_" in prometheus.get("/metrics").text
        problem(prometheus.get("/v1/instances"), 403, "forbidden")
    for user in setup.a.people.values():
        problem(user.client.get("/metrics"), 403, "forbidden")


def test_a_node_reads_and_changes_only_its_own_instances_and_gpus(setup: Setup) -> None:
    thief = WireNode(setup.admin, f"thief-{setup.a.id[-5:]}")
    try:
        received = thief.sync()
        assert received.assignments == []
        # Its reports of an instance on another node change nothing.
        observation = {"instance_id": setup.running, "attempt": 1, "phase": "exited", "exit_code": 1}
        thief.sync({"container_id": "stolen", **observation})  # type: ignore[arg-type]
        assert setup.admin.instance(setup.running)["state"] == "running"
        # Nor do its reports of another node's GPU.
        thief.gpus = [thief.gpus[0].model_copy(update={"uuid": setup.gpu})]
        thief.sync()
        assert setup.admin.get(f"/v1/gpus/{setup.gpu}").json()["node_id"] == setup.working.id
        for path in ("/v1/nodes", f"/v1/nodes/{setup.working.id}", "/v1/instances", "/v1/me", "/metrics"):
            problem(thief.http.get(path), 401, "unauthorized")
    finally:
        setup.admin.delete(f"/v1/nodes/{thief.id}")
        thief.close()


def test_an_owner_finds_users_only_by_their_full_email(setup: Setup) -> None:
    problem(setup.b.owner.get("/v1/users"), 403, "forbidden")
    found = setup.b.owner.items("/v1/users", email="viewer@alpha.example")
    assert [user["id"] for user in found] == [setup.a.people[Role.VIEWER].id]
    assert setup.b.owner.items("/v1/users", email="viewer@alpha") == []


def test_volumes_are_not_shared_between_projects(setup: Setup) -> None:
    made = post(setup.a.member, "/v1/volumes", name="only-of-a")
    for name in (made["id"], "only-of-a"):
        body = {"image": IMAGE, "node_selector": NOWHERE, "volumes": [{"volume": name, "path": "/data"}]}
        found = problem(setup.b.owner.post("/v1/instances", json=body), 422, "unknown_volume")
        unknown = body["volumes"] = [{"volume": "nothing", "path": "/data"}]
        missing = problem(setup.b.owner.post("/v1/instances", json=body), 422, "unknown_volume")
        assert found["detail"].replace(name, "nothing") == missing["detail"], unknown
    answers = [
        setup.b.owner.get(f"/v1/volumes/{volume_id}")
        for volume_id in (made["id"], f"{made['id'][:-6]}000000")
    ]
    _require_same_as_unknown(answers[0], answers[1], made["id"], f"{made['id'][:-6]}000000")
    assert made["id"] not in {each["id"] for each in setup.b.owner.items("/v1/volumes", limit=200)}
    own = post(setup.b.member, "/v1/volumes", name="only-of-a")
    assert own["id"] != made["id"]
    body = {"project_id": setup.a.id, "name": "x", "driver": "local"}
    problem(setup.b.owner.post("/v1/volumes", json=body), 404)
