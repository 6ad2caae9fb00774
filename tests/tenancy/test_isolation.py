"""What one tenant can learn of another: nothing, whichever way they ask."""

import json
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest

from mooring.core.access import Role
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import IMAGE, NOWHERE, World, make_key, post
from tests.testbed.waiting import wait_until

_years = count(3000)  # each reservation has its own
OF_AN_INSTANCE = {
    "GET": ("", "/wait?timeout_s=1", "/logs", "/metrics", "/events", "/explain"),
    "POST": ("/stop", "/start", "/restart", "/exec"),
    "PATCH": ("",),
    "DELETE": ("",),
}
BODIES = {"/exec": {"command": ["id"]}, "PATCH": {"labels": {}}}


def _like_unknown(answer: httpx.Response, unknown: httpx.Response, own: str, other: str) -> None:
    """Both are 404 in the same words, so that nobody learns which of two ids exists."""
    told, expected = problem(answer, 404, "not_found"), problem(unknown, 404, "not_found")
    for document in (told, expected):
        del document["request_id"]
    assert json.dumps(told).replace(own, other) == json.dumps(expected)


@pytest.mark.parametrize(
    ("method", "suffix"), [(method, suffix) for method, all_of in OF_AN_INSTANCE.items() for suffix in all_of]
)
def test_an_instance_of_others_is_like_one_that_never_was(world: World, method: str, suffix: str) -> None:
    unknown = f"{world.running[:-6]}000000"
    for stranger in (world.b.member, world.b.owner):
        body = BODIES.get(suffix) or BODIES.get(method)
        asked = [
            stranger.request(method, f"/v1/instances/{instance_id}{suffix}", json=body)
            for instance_id in (world.running, unknown)
        ]
        _like_unknown(asked[0], asked[1], world.running, unknown)
    assert world.admin.instance(world.running)["state"] == "running"


@pytest.mark.parametrize("suffix", ["", "/members"])
def test_a_project_of_others_is_like_one_that_never_was(world: World, suffix: str) -> None:
    unknown = f"{world.a.id[:-6]}000000"
    asked = [world.b.owner.get(f"/v1/projects/{project_id}{suffix}") for project_id in (world.a.id, unknown)]
    _like_unknown(asked[0], asked[1], world.a.id, unknown)


def test_a_group_of_others_is_like_one_that_never_was(world: World) -> None:
    body = {"count": 2, "template": {"image": IMAGE, "node_selector": NOWHERE}}
    group = post(world.a.member, "/v1/instance-groups", **body)["id"]
    unknown = f"{group[:-6]}000000"
    for method, suffix in (
        ("GET", ""), ("GET", "/explain"), ("POST", "/stop"), ("POST", "/start"), ("DELETE", ""),
    ):  # fmt: skip
        asked = [
            world.b.owner.request(method, f"/v1/instance-groups/{group_id}{suffix}")
            for group_id in (group, unknown)
        ]
        _like_unknown(asked[0], asked[1], group, unknown)
    assert world.admin.get(f"/v1/instance-groups/{group}").json()["state"] == "pending"


def test_a_reservation_of_others_is_like_one_that_never_was(world: World) -> None:
    made = post(
        world.admin, "/v1/reservations", name="alphas", project_id=world.a.id, gpus={"count": 1},
        **{"from": "2098-01-01T00:00:00Z", "to": "2098-01-02T00:00:00Z"},
    )["id"]  # fmt: skip
    assert world.a.viewer.get(f"/v1/reservations/{made}").status_code == 200
    unknown = f"{made[:-6]}000000"
    asked = [world.b.owner.get(f"/v1/reservations/{each}") for each in (made, unknown)]
    _like_unknown(asked[0], asked[1], made, unknown)
    problem(world.a.owner.delete(f"/v1/reservations/{made}"), 403, "forbidden")


@pytest.mark.parametrize(
    "path", ["/v1/instances", "/v1/instance-groups", "/v1/api-keys", "/v1/secrets", "/v1/registries"]
)
def test_nothing_is_made_in_a_project_of_others(world: World, path: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/instances": {"image": IMAGE},
        "/v1/instance-groups": {"count": 1, "template": {"image": IMAGE}},
        "/v1/api-keys": {"name": "k", "role": "viewer"},
        "/v1/secrets": {"name": "token", "value": "x"},
        "/v1/registries": {"server": "ghcr.io", "username": "u", "password": "x"},
    }
    unknown = f"{world.a.id[:-6]}000000"
    for dry_run in ("", "?dry_run=true") if path == "/v1/instances" else ("",):
        asked = [
            world.b.owner.post(f"{path}{dry_run}", json={**bodies[path], "project_id": project_id})
            for project_id in (world.a.id, unknown)
        ]
        _like_unknown(asked[0], asked[1], world.a.id, unknown)
        problem(world.admin.post(path, json={**bodies[path], "project_id": unknown}), 404, "not_found")


@pytest.mark.parametrize(
    "filters",
    [
        lambda world: {"project_id": world.a.id},
        lambda world: {"node_id": world.working.id},
        lambda world: {"name": "a-waits"},
        lambda world: {"label": "of:alpha"},
        lambda world: {"state": "running"},
        lambda _world: {},
    ],
    ids=["project_id", "node_id", "name", "label", "state", "none"],
)
def test_filters_find_only_what_is_ones_own(world: World, filters: Callable[[World], Any]) -> None:
    asked = filters(world)
    assert world.a.viewer.items("/v1/instances", **asked) != []
    found = world.b.owner.items("/v1/instances", **asked)
    assert [item for item in found if item["project_id"] != world.b.id] == []


@pytest.mark.parametrize(
    "path", ["/v1/api-keys", "/v1/secrets", "/v1/registries", "/v1/audit-log", "/v1/instance-groups",
             "/v1/reservations"]
)  # fmt: skip
def test_other_lists_too_find_only_what_is_ones_own(world: World, path: str) -> None:
    post(world.a.owner, "/v1/secrets", name=f"of-{path.rsplit('/', 1)[-1]}", value="x")
    server = f"{path.rsplit('/', 1)[-1]}.example"
    post(world.a.owner, "/v1/registries", server=server, username="u", password="x")
    template = {"image": IMAGE, "node_selector": NOWHERE}
    post(world.a.owner, "/v1/instance-groups", count=1, template=template)
    post(
        world.admin, "/v1/reservations", name="a", project_id=world.a.id, gpus={"count": 1},
        **{"from": f"{next(_years)}-01-01T00:00:00Z", "to": f"{next(_years)}-01-01T00:00:00Z"},
    )  # fmt: skip
    assert world.a.owner.items(path, project_id=world.a.id) != []
    assert world.b.owner.items(path, project_id=world.a.id) == []
    assert {item["project_id"] for item in world.b.owner.items(path, limit=200)} <= {world.b.id}
    assert [item["id"] for item in world.b.owner.items("/v1/projects")] == [world.b.id]


def test_a_cursor_shows_its_bearers_own_list(world: World) -> None:
    mine = world.waiting_instance(world.b.member)
    theirs = [world.waiting_instance() for _ in range(3)]
    page = world.a.owner.get("/v1/instances", params={"limit": 1}).json()
    assert page["items"][0]["id"] == theirs[-1]
    shown = world.b.owner.get("/v1/instances", params={"cursor": page["next_cursor"]}).json()
    assert mine in {item["id"] for item in shown["items"]}
    assert {item["project_id"] for item in shown["items"]} == {world.b.id}


def test_an_idempotency_key_is_its_callers_own(world: World) -> None:
    body = {"image": IMAGE, "node_selector": NOWHERE}
    headers = {"Idempotency-Key": "the-same-for-both"}
    made = [
        client.post("/v1/instances", json=body, headers=headers)
        for client in (world.a.member, world.b.member)
    ]
    again = world.b.member.post("/v1/instances", json=body, headers=headers)
    assert [answer.status_code for answer in made] == [201, 201]
    assert [answer.json()["project_id"] for answer in made] == [world.a.id, world.b.id]
    assert again.content == made[1].content
    # And another body under it is no conflict with a stranger's.
    other = world.b.owner.post("/v1/instances", json={**body, "labels": {"a": "b"}}, headers=headers)
    assert other.status_code == 201


def _all_events(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := client.items("/v1/events", after=found[-1]["seq"] if found else 0, limit=200):
        found += page
    return found


def test_events_are_those_of_ones_own_project_and_of_no_machine(world: World) -> None:
    mine = world.waiting_instance(world.b.member)
    own = {item["id"] for item in world.a.owner.items("/v1/instances", limit=200)}
    events = _all_events(world.b.viewer)
    assert mine in {event["data"].get("instance_id") for event in events}
    assert {event["type"] for event in events} == {"instance.state_changed"}
    assert own.isdisjoint(event["data"]["instance_id"] for event in events)
    assert {event["type"] for event in _all_events(world.admin)} > {"instance.state_changed"}
    assert world.b.viewer.items("/v1/events", after=events[-1]["seq"]) == []


def test_a_stream_of_events_brings_ones_own_only(world: World) -> None:
    newest = _all_events(world.admin)[-1]["seq"]
    heard: list[str] = []
    opened = threading.Event()

    def listen() -> None:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(newest)}
        with world.b.viewer.stream("GET", "/v1/events", headers=headers) as answer:
            opened.set()
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    heard.append(line)
                    return

    listening = threading.Thread(target=listen)
    listening.start()
    assert opened.wait(10)
    theirs, mine = world.waiting_instance(), world.waiting_instance(world.b.member)
    listening.join(20)
    assert len(heard) == 1
    assert (mine in heard[0], theirs in heard[0]) == (True, False)


def test_machines_do_not_tell_what_others_do_with_them(world: World) -> None:
    gpu = f"/v1/gpus/{world.gpu}"
    assert world.a.viewer.get(gpu).json()["instance_id"] == world.running
    assert world.b.owner.get(gpu).json()["instance_id"] is None
    problem(world.b.owner.get(f"{gpu}/metrics"), 403, "forbidden")
    assert world.a.viewer.get(f"{gpu}/metrics").json()["uuid"] == world.gpu
    for client, holder in ((world.a.viewer, world.running), (world.b.owner, None)):
        node = client.get(f"/v1/nodes/{world.working.id}").json()
        assert next(item for item in node["gpus"] if item["uuid"] == world.gpu)["instance_id"] == holder
        assert holder in {item["instance_id"] for item in client.items("/v1/gpus", node_id=world.working.id)}


def test_containers_that_nobody_knows_are_for_admins(world: World) -> None:
    world.wire.sync(
        orphans=[
            {
                "container_id": "c1",
                "name": "alphas-own",
                "instance_id": world.running,
                "control_plane_id": "cpl_other",
            }
        ]
    )
    path = f"/v1/nodes/{world.wire.id}"
    assert world.admin.get(path).json()["orphans"] != []
    for client in (world.a.owner, world.b.owner):
        assert client.get(path).json()["orphans"] == []
    world.wire.sync()


def _reads(world: World) -> list[str]:
    """Every GET of the service that names nothing, or what everybody sees."""
    document: dict[str, Any] = world.admin.get("/openapi.json").json()
    known = {"node_id": world.working.id, "uuid": world.gpu, "project_id": world.b.id}
    quarantined = {**known, "node_id": world.wire.id, "uuid": world.wire.gpus[0].uuid}
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    return [
        path.format(**each)
        for each in (known, quarantined)
        for path in paths
        if not path.startswith("/metrics")
        and ("{" not in path or any(f"{{{name}}}" in path for name in known))
    ]


def _quarantine_a_gpu_of_a(world: World) -> None:
    """Processes of an instance of A are left on its GPU, and its program faults."""
    made = world.a.member.create(name="alphas-last", node_selector={"sandbox": "wire"}, gpus={"count": 1})
    world.admin.wait(made["id"], "scheduled")
    heard = world.wire.sync(instances=None)
    assignment = next(each for each in heard.assignments if each.instance_id == made["id"])
    # The tests beside this one speak of the node's first GPU.
    (uuid,) = assignment.gpu_uuids
    assert uuid == world.wire.gpus[0].uuid
    told = {"uuid": uuid, "message": "processes are still on it: 47114711 (/home/alphas-program)"}
    world.wire.sync(
        observed(assignment, "exited", exit_code=0),
        samples=[{"uuid": uuid, "index": 0, "sampled_at": "2026-11-22T08:00:00Z"}],
        incidents=[{**told, "id": "left", "code": "gpu_not_released"}],
        faults=[{**told, "id": "fault", "code": "xid_31", "count": 47114711}],
    )


def test_no_answer_holds_a_trace_of_another_tenant(world: World) -> None:
    """Whatever A has that can be told apart, looked for in all that B's owner can read."""
    _quarantine_a_gpu_of_a(world)
    world.a.member.create(
        name="alphas-work", image="alpha.example/alphas-image:1", labels={"alphas-label": "alphas-value"},
        env={"ALPHAS": "alphas-env"}, command=["alphas-command"], gpus={"count": 64}, priority=90,
    )  # fmt: skip
    gone = {"alpha", "47114711", world.a.id, world.running, world.waiting}
    gone |= {person.id for person in world.a.people.values()} | {world.a.service["id"]}
    gone |= {person.key["prefix"] for person in world.a.people.values()}
    waits = world.b.member.create(name="betas-work", gpus={"count": 64}, on_capacity="queue")
    # It waits behind A's, and is told that it does, and not behind whom.
    assert wait_until(lambda: world.b.owner.instance(waits["id"])["queue_position"]) >= 2
    paths = [*_reads(world), *(f"/v1/instances/{waits['id']}{of}" for of in ("", "/explain", "/events"))]
    assert len(paths) > 20
    for path in paths:
        answer = world.b.owner.get(
            path, params={"email": "viewer@beta.example"} if path == "/v1/users" else {}
        )
        assert answer.status_code in {200, 403}, (path, answer.text)
        assert [trace for trace in gone if trace in answer.text.replace(world.service.url, "")] == [], path
    dry_run = world.b.owner.post("/v1/instances?dry_run=true", json={"image": IMAGE, "gpus": {"count": 4}})
    refused = world.b.owner.post(
        "/v1/instances", json={"image": IMAGE, "gpus": {"count": 4, "model": "H100"}, "on_capacity": "fail",
                               "node_selector": {"sandbox": "working"}}
    )  # fmt: skip
    assert (dry_run.status_code, refused.status_code) == (200, 409)
    assert [trace for trace in gone if trace in dry_run.text + refused.text] == []
    # The traces are there to be found.
    for path in (f"/v1/gpus/{world.wire.gpus[0].uuid}", f"/v1/gpus/{world.wire.gpus[0].uuid}/incidents"):
        assert "alphas-program" in world.a.viewer.get(path).text
        assert "gpu_not_released" in world.b.viewer.get(path).text
    assert "alphas-program" in world.a.owner.get("/v1/events", params={"limit": 200}).text
    world.admin.post(f"/v1/gpus/{world.wire.gpus[0].uuid}/clear")
    assert "alphas-work" in world.a.owner.get("/v1/instances").text
    world.b.member.delete(f"/v1/instances/{waits['id']}")


def test_two_projects_may_use_one_name(world: World) -> None:
    for client in (world.a.member, world.b.member):
        assert client.create(name="the-same", node_selector=NOWHERE)["name"] == "the-same"
    taken = world.a.member.post("/v1/instances", json={"image": IMAGE, "name": "the-same"})
    problem(taken, 409, "name_taken")
    for client in (world.a.member, world.b.member):
        post(client, "/v1/secrets", name="the-same", value="x")


def test_figures_of_the_service_need_their_own_scope(world: World) -> None:
    reader = make_key(world.admin, scopes=["metrics:read"])
    with Client(world.service.url, key=reader["key"]) as prometheus:
        assert "mooring_" in prometheus.get("/metrics").text
        problem(prometheus.get("/v1/instances"), 403, "forbidden")
    for person in world.a.people.values():
        problem(person.client.get("/metrics"), 403, "forbidden")


def test_a_node_sees_and_moves_only_what_is_its_own(world: World) -> None:
    thief = WireNode(world.admin, f"thief-{world.a.id[-5:]}")
    try:
        heard = thief.sync()
        assert heard.assignments == []
        # What it says of an instance on another node changes nothing.
        told = {"instance_id": world.running, "attempt": 1, "phase": "exited", "exit_code": 1}
        thief.sync({"container_id": "stolen", **told})  # type: ignore[arg-type]
        assert world.admin.instance(world.running)["state"] == "running"
        # Nor does a card that it says is in it.
        thief.gpus = [thief.gpus[0].model_copy(update={"uuid": world.gpu})]
        thief.sync()
        assert world.admin.get(f"/v1/gpus/{world.gpu}").json()["node_id"] == world.working.id
        for path in ("/v1/nodes", f"/v1/nodes/{world.working.id}", "/v1/instances", "/v1/me", "/metrics"):
            problem(thief.http.get(path), 401, "unauthorized")
    finally:
        world.admin.delete(f"/v1/nodes/{thief.id}")
        thief.close()


def test_an_owner_finds_a_person_by_the_whole_address_only(world: World) -> None:
    problem(world.b.owner.get("/v1/users"), 403, "forbidden")
    found = world.b.owner.items("/v1/users", email="viewer@alpha.example")
    assert [person["id"] for person in found] == [world.a.people[Role.VIEWER].id]
    assert world.b.owner.items("/v1/users", email="viewer@alpha") == []
