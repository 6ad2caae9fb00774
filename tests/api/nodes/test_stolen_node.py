"""What a stolen node credential gives access to, and that it gives no more (findings 5 and 14)."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mooring.control.nodes import nodes, start_secrets
from mooring.core.access import on_host
from mooring.core.node import NodeFacts
from mooring.db.tables import Instance
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
    (stream,) = wait_until(corner.node.stream_requests)
    assert thief.stream_requests() == []
    as_earlier_release = thief.facts.model_copy(update={"asks_for_streams": False})
    for facts in (thief.facts, as_earlier_release):
        hears_nothing_of(thief.sync(seen(assignment, "running"), facts=facts), assignment)
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


GROWTH: dict[str, dict[str, Any]] = {
    "labels": {"labels": {"zone": "thief", "tenant": "b"}},
    "label_value": {"labels": {"zone": "b"}},
    "cpus": {"cpus": 4096},
    "memory_mib": {"memory_mib": 2**30},
    "address": {"address": "6.6.6.6"},
    "swarm": {"swarm": {"cluster_id": "of-the-victims", "manager": True}},
    "simulated_gpus": {"simulated_gpus": True},
}


@pytest.mark.parametrize("facts", GROWTH.values(), ids=GROWTH.keys())
def test_a_node_that_reports_more_of_itself_gets_nothing(
    corner: Corner, thief: WireNode, facts: dict[str, Any]
) -> None:
    before = shown(corner, thief)
    honest = thief.facts
    thief.facts = NodeFacts.model_validate({**honest.model_dump(), **facts})
    thief.sync()
    after = shown(corner, thief)
    assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
    effective = ("labels", "cpus", "memory_mib", "address", "simulated")
    assert all(after[name] == before[name] or name == "labels" for name in effective)
    assert after["labels"].items() <= before["labels"].items()
    fields = {**victims(corner), "node_selector": facts.get("labels", {"zone": "thief"})}
    made = corner.client.create(**fields)
    corner.made.append(made["id"])
    wait_until(lambda: corner.client.instance(made["id"])["reason"]["code"] not in {"queued", "no_nodes"})
    answer = thief.sync()
    assert (answer.assignments, answer.overlays) == ([], [])
    assert SECRET not in answer.model_dump_json()
    thief.facts = honest
    thief.sync()
    assert shown(corner, thief)["state"] == "ready"


@pytest.mark.parametrize(
    "claim", [{"allocatable_mib": 2**30}, {"enforced": True}], ids=["more disk", "limits on disk"]
)
def test_a_node_that_reports_more_of_its_disk_gets_nothing(
    corner: Corner, thief: WireNode, claim: dict[str, Any]
) -> None:
    honest = {"total_mib": 2**20, "allocatable_mib": 2**20, "available_mib": 2**20, "driver": "overlay2"}
    thief.facts = NodeFacts.model_validate({**thief.facts.model_dump(), "disk": honest})
    thief.sync()
    before = shown(corner, thief)
    thief.facts = NodeFacts.model_validate({**thief.facts.model_dump(), "disk": {**honest, **claim}})
    thief.sync()
    after = shown(corner, thief)
    assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
    for name in ("disk_allocatable_mib", "disk_enforced"):
        assert after[name] == before[name]


def test_a_node_cannot_make_up_gpus(corner: Corner, thief: WireNode) -> None:
    evil = thief.gpus[0].model_copy(update={"uuid": f"GPU-evil-{thief.name}", "index": 1})
    bigger = thief.gpus[0].model_copy(update={"memory_mib": 2**20})
    better = thief.gpus[0].model_copy(update={"model": "NVIDIA B200"})
    for gpus in ([*thief.gpus, evil], [bigger], [better]):
        thief.sync(gpus=gpus)
        after = shown(corner, thief)
        assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
        assert [(gpu["uuid"], gpu["model"], gpu["memory_mib"]) for gpu in after["gpus"]] == [
            (gpu.uuid, gpu.model, gpu.memory_mib) for gpu in thief.gpus
        ]


def test_a_claim_to_another_nodes_gpu_hurts_neither_node(corner: Corner, thief: WireNode) -> None:
    claimed = corner.node.gpus[0]
    corner.sync(gpus=corner.node.gpus[1:])  # it fell off the bus: the claim comes while it is lost
    for _ in range(2):
        thief.sync(gpus=[*thief.gpus, claimed])
    corner.sync()
    honest, after = shown(corner, corner.node), shown(corner, thief)
    assert (honest["state"], len(honest["gpus"])) == ("ready", 8)
    assert (after["state"], [gpu["uuid"] for gpu in after["gpus"]]) == ("ready", [thief.gpus[0].uuid])


def test_an_endpoint_is_at_the_nodes_approved_address(corner: Corner) -> None:
    assignment = corner.placed(ports=[{"container": 80}])
    forged = [
        {"container": 80, "protocol": "tcp", "host": "6.6.6.6", "port": 32768},
        {"container": 22, "protocol": "tcp", "host": "6.6.6.6", "port": 22},
        {"container": 80, "protocol": "udp", "host": "127.0.0.1", "port": 53},
        {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 70_000},
    ]
    corner.sync(seen(assignment, "running", endpoints=forged))
    assert corner.client.instance(assignment.instance_id)["endpoints"] == [
        {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 32768}
    ]


def test_what_a_node_says_of_an_instance_is_bounded(corner: Corner) -> None:
    assignment = corner.placed()
    forged = {"container_id": "x" * 4000 + "\u202e", "image_digest": "registry.evil/x\n@latest"}
    corner.sync(seen(assignment, "running", **forged))
    after = corner.client.instance(assignment.instance_id)
    assert (after["container_id"], after["image_digest"]) == (None, None)
    reason = {"code": "exited\u202enonzero", "message": "\u001b[31m" + "m" * 4000}
    corner.sync(seen(assignment, "exited", exit_code=-(2**31), reason=reason))
    after = corner.client.instance(assignment.instance_id)
    assert after["exit_code"] == 255
    assert len(after["reason"]["message"]) <= 2001
    assert "\u001b" not in after["reason"]["message"]
    assert "\u202e" not in after["reason"]["code"]


def test_a_node_gives_no_figures_of_another_nodes_gpu(corner: Corner, thief: WireNode) -> None:
    stolen = {
        "uuid": corner.node.gpus[0].uuid, "index": 0, "sampled_at": "2026-11-21T08:00:00Z", "power_w": 66_666,
    }  # fmt: skip
    thief.sync(samples=[stolen])
    assert "66666" not in corner.client.get("/metrics").text
    assert "6.6666e" not in corner.client.get("/metrics").text


def test_another_gpus_mig_device_is_not_listed_twice(corner: Corner, thief: WireNode) -> None:
    device = {"uuid": f"MIG-{corner.node.name}", "profile": "1g.10gb", "memory_mib": 9728}
    mig = {"mig_mode": "enabled", "mig_devices": [device]}
    for node in (corner.node, thief):
        node.gpus[0] = node.gpus[0].model_copy(update={"mig_mode": "disabled"})
        node.sync()
        corner.client.post(f"/v1/nodes/{node.id}/approve")
    corner.sync(gpus=[{**corner.node.gpus[0].model_dump(), **mig}, *corner.node.gpus[1:]])
    thief.sync(gpus=[{**thief.gpus[0].model_dump(), **mig}])
    (gpu,) = shown(corner, thief)["gpus"]
    assert gpu["mig_devices"] == []
    (own, *_others) = shown(corner, corner.node)["gpus"]
    assert [one["uuid"] for one in own["mig_devices"]] == [device["uuid"]]


def test_secrets_are_not_in_any_answer_to_a_report(corner: Corner) -> None:
    assignment = corner.placed(**victims(corner))
    for answer in (corner.sync(instances=None), corner.sync(seen(assignment, "starting"))):
        assert [item.instance_id for item in answer.assignments] == [assignment.instance_id]
        assert SECRET not in answer.model_dump_json()
        assert PASSWORD not in answer.model_dump_json()


def test_members_do_not_see_which_machine_to_attack(corner: Corner, shared: Client) -> None:
    corner.node.facts = corner.node.facts.model_copy(update={"overrides": ["allow_unsafe_toolkit"]})
    corner.sync()
    body = {"name": "k", "role": "member"}
    with Client(corner.service.url, shared.post("/v1/api-keys", json=body).json()["key"]) as member:
        for node in (
            member.get(f"/v1/nodes/{corner.node.id}").json(),
            *member.items("/v1/nodes", name=corner.node.name),
        ):
            assert (node["name"], node["state"], node["labels"]) == (
                corner.node.name, "ready", {"corner": corner.node.name}
            )  # fmt: skip
            assert (len(node["gpus"]), node["cpus"]) == (8, 64)
            assert (node["address"], node["hostname"], node["overrides"]) == (None, None, [])
            assert set(node["versions"].values()) == {None}
    admin = shown(corner, corner.node)
    assert (admin["address"], admin["overrides"]) == ("127.0.0.1", ["allow_unsafe_toolkit"])
    assert admin["versions"]["docker"] == "20.10.24"


def test_an_admin_approves_the_difference_that_they_have_read(corner: Corner, thief: WireNode) -> None:
    path = f"/v1/nodes/{thief.id}/approve"
    thief.facts = thief.facts.model_copy(update={"cpus": 96, "labels": {"zone": "thief", "rack": "3"}})
    thief.sync()
    read = shown(corner, thief)["facts_changed"]
    by_name = {each["fact"]: (each["approved"], each["reported"]) for each in read["changes"]}
    assert by_name == {
        "cpus": (64, 96),
        "labels": ({"zone": "thief"}, {"zone": "thief", "rack": "3"}),
    }
    thief.facts = thief.facts.model_copy(update={"cpus": 4096})  # while the admin is reading
    thief.sync()
    stale = corner.client.post(path, json={"difference_id": read["id"]})
    problem(stale, 409, "facts_changed_again")
    assert shown(corner, thief)["cpus"] == 64
    version_read = shown(corner, thief)["version"]
    thief.facts = thief.facts.model_copy(update={"cpus": 96})
    thief.sync()
    approved = corner.client.post(path, json={"difference_id": read["id"]}).json()
    assert (approved["state"], approved["cpus"], approved["facts_changed"]) == ("ready", 96, None)
    assert approved["labels"] == {"zone": "thief", "rack": "3"}
    assert approved["version"] == version_read + 1
    thief.sync()
    assert shown(corner, thief)["state"] == "ready"
    entry = corner.client.items("/v1/audit-log", target_id=thief.id, limit=1)[0]
    assert entry["action"] == "node.approve"
    assert {each["fact"] for each in entry["after"]["changes"]} == {"cpus", "labels"}
    assert corner.client.post(path).status_code == 200  # nothing to approve


def test_what_shrinks_does_so_at_once_and_may_come_back(corner: Corner, thief: WireNode) -> None:
    full = thief.facts
    less = {"cpus": 8, "memory_mib": 1024, "labels": {}}
    for facts in (full.model_copy(update=less), full, full.model_copy(update=less)):
        thief.facts = facts
        thief.sync()
        after = shown(corner, thief)
        assert (after["state"], after["cpus"], after["memory_mib"], after["labels"]) == (
            "ready", facts.cpus, facts.memory_mib, facts.labels
        )  # fmt: skip


def test_small_steps_of_memory_gain_nothing(corner: Corner, thief: WireNode) -> None:
    approved, state = thief.facts.memory_mib, "ready"
    for step in range(1, 8):
        thief.facts = thief.facts.model_copy(update={"memory_mib": approved * (100 + step) // 100})
        thief.sync()
        after = shown(corner, thief)
        state = "ready" if step <= 5 else "not_ready"
        assert (after["memory_mib"], after["state"]) == (approved, state)


def test_a_node_whose_engine_is_away_approves_no_machine(corner: Corner, shared: Client) -> None:
    node = WireNode(shared, f"away-{corner.node.name}", gpus=0)
    away = {"code": "docker_unavailable", "message": "Docker does not answer"}
    docker, guessed = node.facts, node.facts.model_copy(update={"cpus": 128})
    node.facts = guessed
    node.sync(problem=away)
    node.facts = docker
    node.sync()
    assert (shown(corner, node)["state"], shown(corner, node)["cpus"]) == ("ready", 64)
    node.facts = guessed
    node.sync(problem=away)
    assert shown(corner, node)["reason"]["code"] == "docker_unavailable"
    node.sync()
    assert shown(corner, node)["reason"]["code"] == "facts_changed"
    shared.delete(f"/v1/nodes/{node.id}")
    node.close()


def test_secrets_are_handed_out_for_a_start_on_that_node_only(corner: Corner, thief: WireNode) -> None:
    assignment = corner.placed(**victims(corner))
    for fields in ({}, {"attempt": 0}, {"attempt": 2}):
        problem(thief.ask_for_secrets(assignment, **fields), 404, "not_found")
    problem(corner.node.ask_for_secrets(assignment, attempt=2), 404, "not_found")
    problem(corner.node.ask_for_secrets(assignment, session=0), 409, "stale_session")
    given = corner.node.start_secrets(assignment)
    assert given.secrets == {"TOKEN": SECRET}
    assert given.registry is not None
    assert given.registry.password == PASSWORD
    corner.node.start_secrets(assignment)  # a restarted agent asks again
    mine = {"target_id": assignment.instance_id, "action": "instance.hand_out_secrets"}
    (entry,) = corner.client.items("/v1/audit-log", **mine)
    assert (entry["actor"]["kind"], entry["actor"]["id"]) == ("node", corner.node.id)
    assert entry["after"] == {
        "attempt": 1, "secrets": [f"token-{corner.node.name}"], "registry": REGISTRY
    }  # fmt: skip
    corner.sync(seen(assignment, "running"))
    problem(corner.node.ask_for_secrets(assignment), 404, "not_found")


def test_a_node_that_asks_for_secrets_again_and_again_is_refused(corner: Corner) -> None:
    assignment = corner.placed(**victims(corner))
    with corner.service.plane.database.write() as session:
        row = session.get_one(Instance, assignment.instance_id)
        row.handout_attempt, row.handout_count = 1, start_secrets.MAX_REQUESTS_PER_ATTEMPT - 1
    corner.node.start_secrets(assignment)
    problem(corner.node.ask_for_secrets(assignment), 409, "too_many_handouts")
    corner.client.post(f"/v1/instances/{assignment.instance_id}/restart")
    corner.node.start_secrets(corner.assignment(assignment.instance_id))


def test_an_agent_of_the_release_before_waits_with_what_needs_secrets(corner: Corner) -> None:
    corner.node.facts = corner.node.facts.model_copy(update={"asks_for_secrets": False})
    corner.sync()
    needs, plain = corner.create(**victims(corner)), corner.create()
    for made in (needs, plain):
        corner.client.wait(made["id"], "scheduled")
    answer = corner.node.post_sync(specs=None)
    assert [each["instance_id"] for each in answer.json()["assignments"]] == [plain["id"]]
    assert SECRET not in answer.text
    assert corner.client.instance(needs["id"])["state"] == "scheduled"  # waiting for it is no loss
    corner.node.facts = corner.node.facts.model_copy(update={"asks_for_secrets": True})
    assert corner.assignment(needs["id"]).asks_for_secrets


def test_a_spec_is_sent_once(corner: Corner) -> None:
    first = corner.running(env={"MARK": MARK})
    assert MARK not in corner.node.post_sync(*corner.ran).text
    # An agent that has forgotten it, or has just started, hears it again.
    assert MARK in corner.node.post_sync(*corner.ran, specs={}).text
    assert MARK in corner.node.post_sync(*corner.ran, specs=None).text
    assert MARK in corner.node.post_sync(*corner.ran, specs={first.instance_id: "of another attempt"}).text
    corner.client.post(f"/v1/instances/{first.instance_id}/restart")
    answer = corner.node.post_sync(*corner.ran)
    assert MARK in answer.text
    # The new attempt's answer was lost: nothing is taken for known that the node has not said it has.
    assert MARK in corner.node.post_sync(*corner.ran).text


def test_every_call_of_a_stolen_credential(corner: Corner, thief: WireNode) -> None:
    """Walks all of `/agent/v1` as the thief, with the victim's ids in every place that takes one."""
    waiting = corner.placed(**victims(corner))
    running = corner.running(gpus={"count": 1}, **victims(corner))
    theirs = [seen(each, "exited", exit_code=0) for each in (waiting, running)]
    calls: dict[str, list[httpx.Response]] = {
        "/agent/v1/join": [
            thief.http.post("/agent/v1/join", json={"token": "mj_x", "node_name": "x", "hostname": "x"})
        ],
        "/agent/v1/credential": [thief.http.post("/agent/v1/credential")],
        "/agent/v1/sync": [
            thief.post_sync(*theirs, **fields)
            for fields in (
                {},
                {"gpus": [*thief.gpus, *corner.node.gpus]},
                {"facts": {**corner.node.facts.model_dump(), "swarm": {"cluster_id": "c", "manager": True}}},
                {"specs": {each.instance_id: each.spec_version for each in (waiting, running)}},
                {"generation": 2**62},
            )
        ],
        "/agent/v1/instances/{instance_id}/start-secrets": [
            thief.ask_for_secrets(each, attempt=attempt) for each in (waiting, running) for attempt in (1, 2)
        ],
        "/agent/v1/stream-requests": [thief.post_stream_requests()],
        "/agent/v1/streams/{stream_id}": [
            thief.http.post("/agent/v1/streams/stm_unknown", content=b'{"end": true}\n')
        ],
        "/agent/v1/session": [thief.http.post("/agent/v1/session")],
    }
    document = corner.client.get("/openapi.json").json()
    assert calls.keys() == {path for path in document["paths"] if path.startswith("/agent/v1")}
    for path, answers in calls.items():
        for answer in answers:
            assert answer.status_code < 500, path
            if path != "/agent/v1/sync":
                assert waiting.project_id not in answer.text
            for canary in (SECRET, PASSWORD, MARK, REGISTRY, waiting.name, running.name):
                assert canary not in answer.text, path
            if path == "/agent/v1/sync":
                told = SyncAnswer.model_validate_json(answer.content)
                assert (told.assignments, told.unchanged, told.streams, told.overlays) == ([], [], [], [])
    assert {path: {answer.status_code for answer in answers} for path, answers in calls.items()} == {
        "/agent/v1/join": {401},
        "/agent/v1/credential": {201},
        "/agent/v1/sync": {200},
        "/agent/v1/instances/{instance_id}/start-secrets": {404},
        "/agent/v1/stream-requests": {200},
        "/agent/v1/streams/{stream_id}": {404},
        "/agent/v1/session": {200},
    }
    assert shown(corner, corner.node)["state"] == "ready"
    assert len(shown(corner, corner.node)["gpus"]) == 8
    assert corner.client.instance(running.instance_id)["state"] == "running"
    for each in (waiting, running):
        after = corner.client.instance(each.instance_id)
        assert (after["node_id"], after["exit_code"]) == (corner.node.id, None)


def test_nodes_of_the_operators_own_process_may_change(corner: Corner, thief: WireNode) -> None:
    """`mooring up` with another MOORING_SIMULATE: it says so in the database, which no node can."""
    thief.gpus = [gpu.model_copy(update={"model": "NVIDIA B200"}) for gpu in thief.gpus]
    thief.sync()
    assert shown(corner, thief)["reason"]["code"] == "facts_changed"
    with corner.service.plane.database.write() as session:
        nodes.approve_next_report(session, on_host("node.approve"), [thief.id, "nod_none"])
    thief.sync()
    after = shown(corner, thief)
    assert (after["state"], after["facts_changed"]) == ("ready", None)
    assert [gpu["model"] for gpu in after["gpus"]] == ["NVIDIA B200"]
    thief.facts = thief.facts.model_copy(update={"cpus": 4096})
    thief.sync()
    assert shown(corner, thief)["reason"]["code"] == "facts_changed"
