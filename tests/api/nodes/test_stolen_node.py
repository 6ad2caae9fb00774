"""Limits of what a stolen node credential gives access to (findings 5 and 14 of the audit, decision 17)."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from mooring.control.nodes import nodes, start_secrets
from mooring.core.access import on_host
from mooring.core.node import NodeFacts
from mooring.db.tables import Instance
from mooring.schemas.agent import Assignment, SyncAnswer
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed, output, status
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

SECRET = "S3CRET-of-the-victim"
PASSWORD = "REGPASS-of-the-victim"
MARK = "env-of-the-victim"
REGISTRY = "registry.victim.example.com"


@pytest.fixture
def thief(sandbox: Sandbox, shared: Client) -> Iterator[WireNode]:
    """A node with one H100 that has joined and reported honestly."""
    made = WireNode(shared, f"thief-{sandbox.node.name}", gpus=1)
    made.facts = made.facts.model_copy(update={"labels": {"zone": "thief"}})
    made.sync()
    yield made
    shared.delete(f"/v1/nodes/{made.id}", params={"force": True})
    made.close()


def victim_fields(sandbox: Sandbox) -> dict[str, Any]:
    """Fields of a create with the victim's secret, registry credentials and environment."""
    name = f"token-{sandbox.node.name}"
    sandbox.client.post("/v1/secrets", json={"name": name, "value": SECRET})
    body = {"server": REGISTRY, "username": "ci", "password": PASSWORD}
    sandbox.client.post("/v1/registries", json=body)
    return {"image": f"{REGISTRY}/app:1", "env": {"TOKEN": {"secret": name}, "MARK": MARK}}


def get_node(sandbox: Sandbox, node: WireNode) -> dict[str, Any]:
    return dict(sandbox.client.get(f"/v1/nodes/{node.id}").json())


def require_no_data_of(answer: SyncAnswer, assignment: Assignment) -> None:
    text = answer.model_dump_json()
    assert answer.assignments == []
    assert answer.streams == []
    for canary in (SECRET, PASSWORD, MARK, REGISTRY, assignment.name, assignment.project_id):
        assert canary not in text
    # The answer may ask the node to remove a container, but only repeats what the node has reported of it.
    expected_removal = {
        "instance_id": assignment.instance_id,
        "attempt": assignment.attempt,
        "stop_timeout_s": 10,
    }
    assert all(removal.model_dump() == expected_removal for removal in answer.removals)


def test_a_node_gets_only_its_own_instances(sandbox: Sandbox, thief: WireNode) -> None:
    fields = victim_fields(sandbox)
    waiting, running = sandbox.placed(**fields), sandbox.running(gpus={"count": 1}, **fields)
    sandbox.client.post(f"/v1/instances/{running.instance_id}/stop", json={"timeout_s": 3333})
    assert get_node(sandbox, sandbox.node)["state"] == "ready"
    for assignment in (waiting, running):
        for phase in ("starting", "running", "exited", "refused"):
            require_no_data_of(thief.sync(observed(assignment, phase)), assignment)
        older = observed(assignment, "running").model_copy(update={"attempt": 0})
        answer = thief.sync(older)
        assert (answer.assignments, [gone.stop_timeout_s for gone in answer.removals]) == ([], [10])
        orphan = {
            "container_id": "c", "name": "n", "instance_id": assignment.instance_id, "control_plane_id": None
        }  # fmt: skip
        require_no_data_of(thief.sync(orphans=[orphan]), assignment)
        require_no_data_of(thief.sync(instances=None), assignment)
    assert sandbox.client.instance(waiting.instance_id)["state"] == "scheduled"


def test_a_node_gets_no_streams_of_another_node(sandbox: Sandbox, thief: WireNode) -> None:
    assignment = sandbox.running()
    answers: list[httpx.Response] = []
    path = f"/v1/instances/{assignment.instance_id}/exec"
    thread = threading.Thread(
        target=lambda: answers.append(sandbox.client.post(path, json={"command": [MARK]}))
    )
    thread.start()
    (stream,) = wait_until(sandbox.node.stream_requests)
    assert thief.stream_requests() == []
    as_earlier_release = thief.facts.model_copy(update={"asks_for_streams": False})
    for facts in (thief.facts, as_earlier_release):
        require_no_data_of(thief.sync(observed(assignment, "running"), facts=facts), assignment)
    with pytest.raises(InvalidStatus) as rejected:
        thief.bring(stream.id, output("forged"), status(0))
    assert rejected.value.response.status_code == 404
    sandbox.node.bring(stream.id, output("true"), status(0))
    thread.join(20)
    assert answers[0].status_code == 200


def test_a_node_quarantines_only_its_own_gpus(sandbox: Sandbox, thief: WireNode) -> None:
    incidents = [
        {"id": f"i-{gpu.uuid}", "uuid": gpu.uuid, "code": "xid_79", "message": "no"}
        for gpu in (*sandbox.node.gpus, *thief.gpus)
    ]
    thief.sync(incidents=incidents)
    assert {gpu["health"] for gpu in get_node(sandbox, sandbox.node)["gpus"]} == {"healthy"}
    assert [gpu["health"] for gpu in get_node(sandbox, thief)["gpus"]] == ["quarantined"]


# Facts that exceed the approved ones.
INCREASES: dict[str, dict[str, Any]] = {
    "labels": {"labels": {"zone": "thief", "tenant": "b"}},
    "label_value": {"labels": {"zone": "b"}},
    "cpus": {"cpus": 4096},
    "memory_mib": {"memory_mib": 2**30},
    "address": {"address": "6.6.6.6"},
    "swarm": {"swarm": {"cluster_id": "of-the-victims", "manager": True}},
    "simulated_gpus": {"simulated_gpus": True},
}


@pytest.mark.parametrize("facts", INCREASES.values(), ids=INCREASES.keys())
def test_a_node_that_reports_more_than_approved_gets_no_instances(
    sandbox: Sandbox, thief: WireNode, facts: dict[str, Any]
) -> None:
    before = get_node(sandbox, thief)
    honest = thief.facts
    thief.facts = NodeFacts.model_validate({**honest.model_dump(), **facts})
    thief.sync()
    after = get_node(sandbox, thief)
    assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
    for name in ("cpus", "memory_mib", "address", "simulated"):
        assert after[name] == before[name]
    assert after["labels"].items() <= before["labels"].items()
    fields = {**victim_fields(sandbox), "node_selector": facts.get("labels", {"zone": "thief"})}
    made = sandbox.client.create(**fields)
    sandbox.created_ids.append(made["id"])
    wait_until(lambda: sandbox.client.instance(made["id"])["reason"]["code"] not in {"queued", "no_nodes"})
    answer = thief.sync()
    assert (answer.assignments, answer.overlays) == ([], [])
    assert SECRET not in answer.model_dump_json()
    thief.facts = honest
    thief.sync()
    assert get_node(sandbox, thief)["state"] == "ready"


@pytest.mark.parametrize(
    "claim", [{"allocatable_mib": 2**30}, {"enforced": True}], ids=["more disk", "limits on disk"]
)
def test_a_node_that_reports_more_disk_than_approved_is_not_ready(
    sandbox: Sandbox, thief: WireNode, claim: dict[str, Any]
) -> None:
    honest = {"total_mib": 2**20, "allocatable_mib": 2**20, "available_mib": 2**20, "driver": "overlay2"}
    thief.facts = NodeFacts.model_validate({**thief.facts.model_dump(), "disk": honest})
    thief.sync()
    before = get_node(sandbox, thief)
    thief.facts = NodeFacts.model_validate({**thief.facts.model_dump(), "disk": {**honest, **claim}})
    thief.sync()
    after = get_node(sandbox, thief)
    assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
    for name in ("disk_allocatable_mib", "disk_enforced"):
        assert after[name] == before[name]


def test_a_node_cannot_add_or_change_gpus_without_approval(sandbox: Sandbox, thief: WireNode) -> None:
    added = thief.gpus[0].model_copy(update={"uuid": f"GPU-added-{thief.name}", "index": 1})
    bigger = thief.gpus[0].model_copy(update={"memory_mib": 2**20})
    better = thief.gpus[0].model_copy(update={"model": "NVIDIA B200"})
    for gpus in ([*thief.gpus, added], [bigger], [better]):
        thief.sync(gpus=gpus)
        after = get_node(sandbox, thief)
        assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
        assert [(gpu["uuid"], gpu["model"], gpu["memory_mib"]) for gpu in after["gpus"]] == [
            (gpu.uuid, gpu.model, gpu.memory_mib) for gpu in thief.gpus
        ]


def test_reporting_another_nodes_gpu_affects_neither_node(sandbox: Sandbox, thief: WireNode) -> None:
    claimed = sandbox.node.gpus[0]
    sandbox.sync(gpus=sandbox.node.gpus[1:])  # the GPU is lost when the other node reports it
    for _ in range(2):
        thief.sync(gpus=[*thief.gpus, claimed])
    sandbox.sync()
    honest, after = get_node(sandbox, sandbox.node), get_node(sandbox, thief)
    assert (honest["state"], len(honest["gpus"])) == ("ready", 8)
    assert (after["state"], [gpu["uuid"] for gpu in after["gpus"]]) == ("ready", [thief.gpus[0].uuid])


def test_endpoints_have_the_nodes_approved_address(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(ports=[{"container": 80}])
    forged = [
        {"container": 80, "protocol": "tcp", "host": "6.6.6.6", "port": 32768},
        {"container": 22, "protocol": "tcp", "host": "6.6.6.6", "port": 22},
        {"container": 80, "protocol": "udp", "host": "127.0.0.1", "port": 53},
        {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 70_000},
    ]
    sandbox.sync(observed(assignment, "running", endpoints=forged))
    (endpoint,) = sandbox.client.instance(assignment.instance_id)["endpoints"]
    assert endpoint.pop("url").endswith(f"/p/{assignment.instance_id}/80/")
    assert endpoint == {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 32768}


def test_reported_fields_of_an_instance_are_validated_and_limited(sandbox: Sandbox) -> None:
    assignment = sandbox.placed()
    forged = {"container_id": "x" * 4000 + "\u202e", "image_digest": "registry.evil/x\n@latest"}
    sandbox.sync(observed(assignment, "running", **forged))
    after = sandbox.client.instance(assignment.instance_id)
    assert (after["container_id"], after["image_digest"]) == (None, None)
    reason = {"code": "exited\u202enonzero", "message": "\u001b[31m" + "m" * 4000}
    sandbox.sync(observed(assignment, "exited", exit_code=-(2**31), reason=reason))
    after = sandbox.client.instance(assignment.instance_id)
    assert after["exit_code"] == 255
    assert len(after["reason"]["message"]) <= 2001
    assert "\u001b" not in after["reason"]["message"]
    assert "\u202e" not in after["reason"]["code"]


def test_samples_of_another_nodes_gpu_are_ignored(sandbox: Sandbox, thief: WireNode) -> None:
    stolen = {
        "uuid": sandbox.node.gpus[0].uuid, "index": 0, "power_w": 66_666,
        "sampled_at": "2026-11-21T08:00:00Z",
    }  # fmt: skip
    thief.sync(samples=[stolen])
    assert "66666" not in sandbox.client.get("/metrics").text
    assert "6.6666e" not in sandbox.client.get("/metrics").text


def test_a_mig_device_of_another_gpu_is_ignored(sandbox: Sandbox, thief: WireNode) -> None:
    device = {"uuid": f"MIG-{sandbox.node.name}", "profile": "1g.10gb", "memory_mib": 9728}
    mig = {"mig_mode": "enabled", "mig_devices": [device]}
    for node in (sandbox.node, thief):
        node.gpus[0] = node.gpus[0].model_copy(update={"mig_mode": "disabled"})
        node.sync()
        sandbox.client.post(f"/v1/nodes/{node.id}/approve")
    sandbox.sync(gpus=[{**sandbox.node.gpus[0].model_dump(), **mig}, *sandbox.node.gpus[1:]])
    thief.sync(gpus=[{**thief.gpus[0].model_dump(), **mig}])
    (gpu,) = get_node(sandbox, thief)["gpus"]
    assert gpu["mig_devices"] == []
    (own, *_others) = get_node(sandbox, sandbox.node)["gpus"]
    assert [each["uuid"] for each in own["mig_devices"]] == [device["uuid"]]


def test_secrets_are_not_in_any_answer_to_a_report(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(**victim_fields(sandbox))
    for answer in (sandbox.sync(instances=None), sandbox.sync(observed(assignment, "starting"))):
        assert [item.instance_id for item in answer.assignments] == [assignment.instance_id]
        assert SECRET not in answer.model_dump_json()
        assert PASSWORD not in answer.model_dump_json()


def test_members_do_not_see_addresses_versions_and_overrides_of_nodes(
    sandbox: Sandbox, shared: Client
) -> None:
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"overrides": ["allow_unsafe_toolkit"]})
    sandbox.sync()
    body = {"name": "k", "role": "member"}
    with Client(sandbox.service.url, shared.post("/v1/api-keys", json=body).json()["key"]) as member:
        for node in (
            member.get(f"/v1/nodes/{sandbox.node.id}").json(),
            *member.items("/v1/nodes", name=sandbox.node.name),
        ):
            assert (node["name"], node["state"], node["labels"]) == (
                sandbox.node.name, "ready", {"sandbox": sandbox.node.name}
            )  # fmt: skip
            assert (len(node["gpus"]), node["cpus"]) == (8, 64)
            assert (node["address"], node["hostname"], node["overrides"]) == (None, None, [])
            assert set(node["versions"].values()) == {None}
    admin = get_node(sandbox, sandbox.node)
    assert (admin["address"], admin["overrides"]) == ("127.0.0.1", ["allow_unsafe_toolkit"])
    assert admin["versions"]["docker"] == "20.10.24"


def test_an_admin_approves_only_the_difference_that_was_read(sandbox: Sandbox, thief: WireNode) -> None:
    path = f"/v1/nodes/{thief.id}/approve"
    thief.facts = thief.facts.model_copy(update={"cpus": 96, "labels": {"zone": "thief", "rack": "3"}})
    thief.sync()
    read = get_node(sandbox, thief)["facts_changed"]
    by_name = {each["fact"]: (each["approved"], each["reported"]) for each in read["changes"]}
    assert by_name == {
        "cpus": (64, 96),
        "labels": ({"zone": "thief"}, {"zone": "thief", "rack": "3"}),
    }
    # The facts change after the admin has read the difference.
    thief.facts = thief.facts.model_copy(update={"cpus": 4096})
    thief.sync()
    stale = sandbox.client.post(path, json={"difference_id": read["id"]})
    problem(stale, 409, "facts_changed_again")
    assert get_node(sandbox, thief)["cpus"] == 64
    version_read = get_node(sandbox, thief)["version"]
    thief.facts = thief.facts.model_copy(update={"cpus": 96})
    thief.sync()
    approved = sandbox.client.post(path, json={"difference_id": read["id"]}).json()
    assert (approved["state"], approved["cpus"], approved["facts_changed"]) == ("ready", 96, None)
    assert approved["labels"] == {"zone": "thief", "rack": "3"}
    assert approved["version"] == version_read + 1
    thief.sync()
    assert get_node(sandbox, thief)["state"] == "ready"
    entry = sandbox.client.items("/v1/audit-log", target_id=thief.id, limit=1)[0]
    assert entry["action"] == "node.approve"
    assert {each["fact"] for each in entry["after"]["changes"]} == {"cpus", "labels"}
    assert sandbox.client.post(path).status_code == 200  # no difference is left to approve


def test_smaller_facts_apply_immediately_and_may_grow_back(sandbox: Sandbox, thief: WireNode) -> None:
    full = thief.facts
    less = {"cpus": 8, "memory_mib": 1024, "labels": {}}
    for facts in (full.model_copy(update=less), full, full.model_copy(update=less)):
        thief.facts = facts
        thief.sync()
        after = get_node(sandbox, thief)
        assert (after["state"], after["cpus"], after["memory_mib"], after["labels"]) == (
            "ready", facts.cpus, facts.memory_mib, facts.labels
        )  # fmt: skip


def test_small_increases_of_memory_do_not_change_the_approved_amount(
    sandbox: Sandbox, thief: WireNode
) -> None:
    approved = thief.facts.memory_mib
    for step in range(1, 8):
        thief.facts = thief.facts.model_copy(update={"memory_mib": approved * (100 + step) // 100})
        thief.sync()
        after = get_node(sandbox, thief)
        state = "ready" if step <= 5 else "not_ready"
        assert (after["memory_mib"], after["state"]) == (approved, state)


def test_facts_reported_without_docker_are_not_approved(sandbox: Sandbox, shared: Client) -> None:
    node = WireNode(shared, f"without-docker-{sandbox.node.name}", gpus=0)
    docker_problem = {"code": "docker_unavailable", "message": "Docker does not answer"}
    facts_of_docker, guessed = node.facts, node.facts.model_copy(update={"cpus": 128})
    node.facts = guessed
    node.sync(problem=docker_problem)
    node.facts = facts_of_docker
    node.sync()
    assert (get_node(sandbox, node)["state"], get_node(sandbox, node)["cpus"]) == ("ready", 64)
    node.facts = guessed
    node.sync(problem=docker_problem)
    assert get_node(sandbox, node)["reason"]["code"] == "docker_unavailable"
    node.sync()
    assert get_node(sandbox, node)["reason"]["code"] == "facts_changed"
    shared.delete(f"/v1/nodes/{node.id}")
    node.close()


def test_secrets_are_handed_out_only_for_a_start_on_their_node(sandbox: Sandbox, thief: WireNode) -> None:
    assignment = sandbox.placed(**victim_fields(sandbox))
    for fields in ({}, {"attempt": 0}, {"attempt": 2}):
        problem(thief.post_start_secrets(assignment, **fields), 404, "not_found")
    problem(sandbox.node.post_start_secrets(assignment, attempt=2), 404, "not_found")
    problem(sandbox.node.post_start_secrets(assignment, session=0), 409, "stale_session")
    given = sandbox.node.start_secrets(assignment)
    assert given.secrets == {"TOKEN": SECRET}
    assert given.registry is not None
    assert given.registry.password == PASSWORD
    sandbox.node.start_secrets(assignment)  # a restarted agent requests them again
    filters = {"target_id": assignment.instance_id, "action": "instance.hand_out_secrets"}
    (entry,) = sandbox.client.items("/v1/audit-log", **filters)
    assert (entry["actor"]["kind"], entry["actor"]["id"]) == ("node", sandbox.node.id)
    assert entry["after"] == {
        "attempt": 1, "secrets": [f"token-{sandbox.node.name}"], "registry": REGISTRY
    }  # fmt: skip
    sandbox.sync(observed(assignment, "running"))
    problem(sandbox.node.post_start_secrets(assignment), 404, "not_found")


def test_requests_for_secrets_are_limited_per_attempt(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(**victim_fields(sandbox))
    with sandbox.service.plane.database.write() as session:
        row = session.get_one(Instance, assignment.instance_id)
        row.handout_attempt, row.handout_count = 1, start_secrets.MAX_REQUESTS_PER_ATTEMPT - 1
    sandbox.node.start_secrets(assignment)
    problem(sandbox.node.post_start_secrets(assignment), 409, "too_many_handouts")
    sandbox.client.post(f"/v1/instances/{assignment.instance_id}/restart")
    sandbox.node.start_secrets(sandbox.assignment(assignment.instance_id))


def test_an_agent_of_the_previous_release_gets_no_assignments_with_secrets(sandbox: Sandbox) -> None:
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"asks_for_secrets": False})
    sandbox.sync()
    with_secrets, plain = sandbox.create(**victim_fields(sandbox)), sandbox.create()
    for made in (with_secrets, plain):
        sandbox.client.wait(made["id"], "scheduled")
    answer = sandbox.node.post_sync(specs=None)
    assert [each["instance_id"] for each in answer.json()["assignments"]] == [plain["id"]]
    assert SECRET not in answer.text
    # The instance whose assignment is missing does not fail.
    assert sandbox.client.instance(with_secrets["id"])["state"] == "scheduled"
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"asks_for_secrets": True})
    assert sandbox.assignment(with_secrets["id"]).asks_for_secrets


def test_a_known_spec_is_not_sent_again(sandbox: Sandbox) -> None:
    first = sandbox.running(env={"MARK": MARK})
    assert MARK not in sandbox.node.post_sync(*sandbox.reported).text
    # An agent that does not know the spec gets it again.
    assert MARK in sandbox.node.post_sync(*sandbox.reported, specs={}).text
    assert MARK in sandbox.node.post_sync(*sandbox.reported, specs=None).text
    outdated = {first.instance_id: "of another attempt"}
    assert MARK in sandbox.node.post_sync(*sandbox.reported, specs=outdated).text
    sandbox.client.post(f"/v1/instances/{first.instance_id}/restart")
    answer = sandbox.node.post_sync(*sandbox.reported)
    assert MARK in answer.text
    # The spec is sent until the node reports it as known: the answer may have been lost.
    assert MARK in sandbox.node.post_sync(*sandbox.reported).text


def test_no_call_with_a_stolen_credential_returns_data_of_others(sandbox: Sandbox, thief: WireNode) -> None:
    """Calls all of `/agent/v1` with the stolen credential and the victim's IDs."""
    waiting = sandbox.placed(**victim_fields(sandbox))
    running = sandbox.running(gpus={"count": 1}, **victim_fields(sandbox))
    reports = [observed(each, "exited", exit_code=0) for each in (waiting, running)]
    calls: dict[str, list[httpx.Response]] = {
        "/agent/v1/join": [
            thief.http.post("/agent/v1/join", json={"token": "mj_x", "node_name": "x", "hostname": "x"})
        ],
        "/agent/v1/credential": [thief.http.post("/agent/v1/credential")],
        "/agent/v1/sync": [
            thief.post_sync(*reports, **fields)
            for fields in (
                {},
                {"gpus": [*thief.gpus, *sandbox.node.gpus]},
                {"facts": {**sandbox.node.facts.model_dump(), "swarm": {"cluster_id": "c", "manager": True}}},
                {"specs": {each.instance_id: each.spec_version for each in (waiting, running)}},
                {"generation": 2**62},
            )
        ],
        "/agent/v1/heartbeat": [thief.post_heartbeat(seq=seq, revision=0) for seq in (0, thief.seq)],
        "/agent/v1/instances/{instance_id}/start-secrets": [
            thief.post_start_secrets(each, attempt=attempt)
            for each in (waiting, running)
            for attempt in (1, 2)
        ],
        "/agent/v1/stream-requests": [thief.post_stream_requests()],
        "/agent/v1/streams/{stream_id}": [thief.http.get("/agent/v1/streams/stm_unknown")],
        "/agent/v1/session": [thief.http.post("/agent/v1/session")],
    }
    document = sandbox.client.get("/openapi.json").json()
    assert calls.keys() == {path for path in document["paths"] if path.startswith("/agent/v1")}
    for path, answers in calls.items():
        for answer in answers:
            assert answer.status_code < 500, path
            if path != "/agent/v1/sync":
                assert waiting.project_id not in answer.text
            for canary in (SECRET, PASSWORD, MARK, REGISTRY, waiting.name, running.name):
                assert canary not in answer.text, path
            if path == "/agent/v1/sync":
                parsed = SyncAnswer.model_validate_json(answer.content)
                assert (
                    parsed.assignments,
                    parsed.unchanged,
                    parsed.streams,
                    parsed.overlays,
                ) == ([], [], [], [])
    assert {path: {answer.status_code for answer in answers} for path, answers in calls.items()} == {
        "/agent/v1/join": {401},
        "/agent/v1/credential": {201},
        "/agent/v1/sync": {200},
        "/agent/v1/instances/{instance_id}/start-secrets": {404},
        "/agent/v1/heartbeat": {200},
        "/agent/v1/stream-requests": {200},
        "/agent/v1/streams/{stream_id}": {404},
        "/agent/v1/session": {200},
    }
    assert get_node(sandbox, sandbox.node)["state"] == "ready"
    assert len(get_node(sandbox, sandbox.node)["gpus"]) == 8
    assert sandbox.client.instance(running.instance_id)["state"] == "running"
    for each in (waiting, running):
        after = sandbox.client.instance(each.instance_id)
        assert (after["node_id"], after["exit_code"]) == (sandbox.node.id, None)


def test_the_next_report_of_a_node_can_be_approved_in_advance(sandbox: Sandbox, thief: WireNode) -> None:
    """`mooring up` does so in the database after a change of MOORING_SIMULATE."""
    thief.gpus = [gpu.model_copy(update={"model": "NVIDIA B200"}) for gpu in thief.gpus]
    thief.sync()
    assert get_node(sandbox, thief)["reason"]["code"] == "facts_changed"
    with sandbox.service.plane.database.write() as session:
        nodes.approve_next_report(session, on_host("node.approve"), [thief.id, "nod_none"])
    thief.sync()
    after = get_node(sandbox, thief)
    assert (after["state"], after["facts_changed"]) == ("ready", None)
    assert [gpu["model"] for gpu in after["gpus"]] == ["NVIDIA B200"]
    thief.facts = thief.facts.model_copy(update={"cpus": 4096})
    thief.sync()
    assert get_node(sandbox, thief)["reason"]["code"] == "facts_changed"
