"""GPU health over HTTP: who is quarantined for what, who is told, and who sees whose words."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from mooring.control.nodes import gpu_health
from mooring.core.gpu import GpuFacts
from mooring.db.tables import Event, GpuCondition, GpuIncident
from mooring.db.types import now
from mooring.schemas.agent import Assignment
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client

RESETS_AND_REBOOTS = [46, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158]
SECRET = "4711 (/home/alice/acme-merger-model/train.py)"


def _incident(sandbox: Sandbox, index: int, code: str, number: str = "1", **fields: Any) -> dict[str, Any]:
    return {
        "id": f"{code}/{number}/{index}", "uuid": sandbox.node.gpus[index].uuid, "code": code,
        "message": f"processes are still on it: {SECRET}", **fields,
    }  # fmt: skip


def _gpu(client: Client, sandbox: Sandbox, index: int) -> dict[str, Any]:
    answer = client.get(f"/v1/gpus/{sandbox.node.gpus[index].uuid}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _incidents(client: Client, sandbox: Sandbox, index: int, **params: Any) -> list[dict[str, Any]]:
    return client.items(f"/v1/gpus/{sandbox.node.gpus[index].uuid}/incidents", **params)


def _told(sandbox: Sandbox, instance_id: str) -> list[tuple[str, str, str]]:
    """What the instance was told of its GPUs."""
    return [
        (event["type"], event["data"]["reason"]["code"], event["data"]["action"])
        for event in sandbox.client.items(f"/v1/instances/{instance_id}/events", limit=200)
        if event["type"].startswith("instance.gpu_")
    ]


@contextmanager
def _member_of_a_project(sandbox: Sandbox, name: str) -> Iterator[tuple[Client, str]]:
    project = sandbox.client.post("/v1/projects", json={"name": f"{name}-{sandbox.node.name}"}).json()["id"]
    body = {"name": "k", "project_id": project, "role": "member"}
    with Client(sandbox.service.url, sandbox.client.post("/v1/api-keys", json=body).json()["key"]) as made:
        yield made, project


def _run(sandbox: Sandbox, client: Client, **fields: Any) -> Assignment:
    made = client.create(node_selector={"sandbox": sandbox.node.name}, **fields)
    sandbox.made.append(made["id"])
    client.wait(made["id"], "scheduled")
    assignment = sandbox.assignment(made["id"])
    sandbox.ran.append(observed(assignment, "running"))
    sandbox.sync(*sandbox.ran)
    return assignment


@pytest.mark.parametrize("listed_as", ["incidents", "faults"])
def test_an_application_fault_is_told_and_takes_no_gpu_out_of_use(sandbox: Sandbox, listed_as: str) -> None:
    """An agent of an earlier release calls XID 32, 69, 80 and 94 incidents; each of them quarantined."""
    assignment = sandbox.running(gpus={"count": 8})
    faults = [_incident(sandbox, 0, f"xid_{code}") for code in (32, 69, 80, 94)]
    sandbox.sync(*sandbox.ran, **{listed_as: faults})
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["reason"], shown["placement"]) == ("healthy", None, "normal")
    assert {each["code"] for each in shown["conditions"]} == {"xid_32", "xid_69", "xid_80", "xid_94"}
    assert {(each["severity"], each["action"]) for each in shown["conditions"]} == {("info", "restart_app")}
    assert sorted(_told(sandbox, assignment.instance_id)) == [
        ("instance.gpu_fault", f"xid_{code}", "restart_app") for code in (32, 69, 80, 94)
    ]


@pytest.mark.parametrize("code", RESETS_AND_REBOOTS)
def test_what_needs_a_reset_or_reboot_quarantines_and_its_instance_is_told(
    sandbox: Sandbox, code: int
) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    well = [gpu.model_copy(update={"recovery_action": "none"}) for gpu in sandbox.node.gpus]
    sandbox.sync(*sandbox.ran, gpus=well, incidents=[_incident(sandbox, 2, f"xid_{code}")])
    shown = _gpu(sandbox.client, sandbox, 2)
    action = "reboot" if code in {79, 151} else "reset"
    assert (shown["health"], shown["reason"]["code"], shown["placement"]) == (
        "quarantined", f"xid_{code}", "none"
    )  # fmt: skip
    assert [(each["code"], each["severity"], each["action"]) for each in shown["conditions"]] == [
        (f"xid_{code}", "fatal", action)
    ]
    assert shown["recovery"] is None
    assert _told(sandbox, assignment.instance_id) == [("instance.gpu_unhealthy", f"xid_{code}", action)]
    others = [_gpu(sandbox.client, sandbox, index)["health"] for index in (0, 1, 3, 7)]
    assert set(others) == {"healthy"}


@pytest.mark.parametrize(
    ("recovery_action", "health", "placement"),
    [("none", "healthy", "last"), (None, "quarantined", "none"), ("reset_required", "quarantined", "none")],
)
def test_an_error_that_the_catalogue_does_not_decide_is_decided_by_the_recovery_action(
    sandbox: Sandbox, recovery_action: str | None, health: str, placement: str
) -> None:
    told = {"recovery_action": recovery_action}
    cards = [sandbox.node.gpus[0].model_copy(update=told), *sandbox.node.gpus[1:]]
    sandbox.sync(gpus=cards, incidents=[_incident(sandbox, 0, "xid_48")])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["placement"]) == (health, placement)


@pytest.mark.parametrize(
    ("fault", "action"),
    [
        ("reset_required", "reset"), ("recovery_node_reboot", "reboot"),
        ("recovery_imex_domain", "service"), ("recovery_bus_reset", "reset"),
        ("recovery_system_reboot", "reboot"), ("recovery_action_9", "service"),
    ],
)  # fmt: skip
def test_every_recovery_action_quarantines_and_is_told(sandbox: Sandbox, fault: str, action: str) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    broken = sandbox.node.gpus[0].model_copy(update={"fault": fault, "recovery_action": fault})
    for _ in range(3):
        sandbox.sync(*sandbox.ran, gpus=[broken, *sandbox.node.gpus[1:]])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["reason"]["code"]) == ("quarantined", fault)
    assert [(each["action"], each["count"]) for each in shown["conditions"]] == [(action, 1)]
    assert _told(sandbox, assignment.instance_id) == [("instance.gpu_unhealthy", fault, action)]


def test_ten_thousand_application_faults_quarantine_nothing_and_flood_nothing(sandbox: Sandbox) -> None:
    """As an old agent may tell them, one by one, 1,000 a report; and as one that counts does."""
    assignment = sandbox.running(gpus={"count": 8})
    codes = [13, 31, 32, 43, 45, 68, 69, 80, 94, 8]
    before = _counted(sandbox)
    for batch in range(10):
        told = [
            _incident(sandbox, number % 8, f"xid_{codes[number // 100]}", f"{batch}-{number}")
            for number in range(1000)
        ]
        sandbox.sync(*sandbox.ran, incidents=told)
    for index in range(8):
        shown = _gpu(sandbox.client, sandbox, index)
        assert (shown["health"], shown["placement"]) == ("healthy", "normal")
        assert sum(each["count"] for each in shown["conditions"]) == 1250
        assert sum(each["count"] for each in _incidents(sandbox.client, sandbox, index)) == 1250
    assert len(_told(sandbox, assignment.instance_id)) == 8 * len(codes)
    conditions, incidents, events = (
        after - was for after, was in zip(_counted(sandbox), before, strict=True)
    )
    assert (conditions, incidents, events) == (80, 80, 80)


def _counted(sandbox: Sandbox) -> list[int]:
    uuids = [gpu.uuid for gpu in sandbox.node.gpus]
    with sandbox.service.plane.database.read() as session:
        return [
            session.scalar(select(func.count()).where(GpuCondition.gpu_uuid.in_(uuids))) or 0,
            session.scalar(select(func.count()).where(GpuIncident.gpu_uuid.in_(uuids))) or 0,
            session.scalar(select(func.count()).where(Event.type == "instance.gpu_fault")) or 0,
        ]


def test_what_is_kept_of_a_gpu_is_bounded_and_faults_push_out_no_error_of_the_hardware(
    sandbox: Sandbox,
) -> None:
    sandbox.sync(incidents=[_incident(sandbox, 0, "xid_79")])
    for number in range(gpu_health.INCIDENTS_KEPT + 50):
        # Each of another hour, so that none is counted with the one before.
        _age(sandbox, timedelta(hours=2))
        sandbox.sync(faults=[_incident(sandbox, 0, "xid_31", str(number))])
    found = _incidents(sandbox.client, sandbox, 0, limit=200)
    assert len(found) == gpu_health.INCIDENTS_KEPT + 1
    assert found[-1]["code"] == "xid_79"
    sandbox.sync(faults=[_incident(sandbox, 0, f"fault_{number}") for number in range(200)])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert len(shown["conditions"]) == gpu_health.CONDITIONS_KEPT


def _age(sandbox: Sandbox, age: timedelta) -> None:
    """What is on record of the node's GPUs happened so much earlier."""
    uuids = [gpu.uuid for gpu in sandbox.node.gpus]
    with sandbox.service.plane.database.write() as session:
        for table in (GpuCondition, GpuIncident):
            moments = {"since": now() - age, "last_at": now() - age}
            session.execute(update(table).where(table.gpu_uuid.in_(uuids)).values(**moments))


def test_a_flood_of_one_fatal_error_is_one_change_of_health(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    for number in range(20):
        sandbox.sync(*sandbox.ran, incidents=[_incident(sandbox, 0, "xid_79", str(number))])
    assert len(_told(sandbox, assignment.instance_id)) == 1
    (condition,) = _gpu(sandbox.client, sandbox, 0)["conditions"]
    assert condition["count"] == 20
    (incident,) = _incidents(sandbox.client, sandbox, 0)
    assert incident["count"] == 20


def test_a_fault_is_counted_once_however_often_it_is_reported(sandbox: Sandbox) -> None:
    first, second = _incident(sandbox, 0, "xid_31", count=40), _incident(sandbox, 0, "xid_31", "2", count=2)
    sandbox.sync(faults=[first])
    sandbox.sync(faults=[first, second])
    sandbox.sync(faults=[first, second])
    (condition,) = _gpu(sandbox.client, sandbox, 0)["conditions"]
    assert condition["count"] == 42


def test_rows_that_wait_to_be_remapped_are_a_warning_and_last_for_new_work(sandbox: Sandbox) -> None:
    waits = sandbox.node.gpus[0].model_copy(update={"conditions": ["row_remap_pending"]})
    for _ in range(2):
        sandbox.sync(gpus=[waits, *sandbox.node.gpus[1:]])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["placement"]) == ("healthy", "last")
    (condition,) = shown["conditions"]
    del condition["since"], condition["last_at"]
    assert condition == {"code": "row_remap_pending", "severity": "warn", "action": "reset", "count": 1}
    sandbox.node.gpus[0] = waits
    first = sandbox.placed(gpus={"count": 7})
    assert waits.uuid not in first.gpu_uuids
    assert sandbox.placed(gpus={"count": 1}).gpu_uuids == [waits.uuid]  # nothing else fits
    sandbox.node.gpus[0] = waits.model_copy(update={"conditions": []})
    sandbox.sync(instances=None)
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["placement"], shown["conditions"]) == ("normal", [])


def test_another_node_is_preferred_to_a_gpu_with_a_warning(sandbox: Sandbox, shared: Client) -> None:
    other = WireNode(shared, f"other-{sandbox.node.name}", gpus=1)
    other.facts = other.facts.model_copy(update={"labels": {"sandbox": sandbox.node.name}})
    other.sync()
    try:
        sandbox.node.gpus = [
            gpu.model_copy(update={"conditions": ["row_remap_pending"]}) for gpu in sandbox.node.gpus[:1]
        ]
        sandbox.sync()
        made = [sandbox.create(gpus={"count": 1})["id"] for _ in range(2)]
        places = [sandbox.client.wait(one, "scheduled")["node_id"] for one in made]
        assert places == [other.id, sandbox.node.id]
    finally:
        for one in made:
            shared.delete(f"/v1/instances/{one}")
        other.sync()
        shared.delete(f"/v1/nodes/{other.id}", params={"force": True})
        other.close()


def test_a_warning_is_over_after_a_day_and_a_fatal_error_when_an_admin_says_so(sandbox: Sandbox) -> None:
    told = [_incident(sandbox, 0, code) for code in ("xid_92", "xid_31")]
    sandbox.sync(incidents=[_incident(sandbox, 0, "xid_79")], faults=told)
    sandbox.sync(faults=[_incident(sandbox, 1, "xid_92")])
    assert [_gpu(sandbox.client, sandbox, index)["placement"] for index in (0, 1)] == ["none", "last"]
    _age(sandbox, timedelta(hours=25))
    with sandbox.service.plane.database.write() as session:
        gpu_health.delete_expired(session)
    shown = [_gpu(sandbox.client, sandbox, index) for index in (0, 1)]
    assert [[each["code"] for each in one["conditions"]] for one in shown] == [["xid_79"], []]
    assert [one["placement"] for one in shown] == ["none", "normal"]
    cleared = sandbox.client.post(f"/v1/gpus/{sandbox.node.gpus[0].uuid}/clear").json()
    assert (cleared["health"], cleared["conditions"], cleared["placement"]) == ("healthy", [], "normal")


def test_a_node_cannot_say_anything_of_another_nodes_gpus(sandbox: Sandbox, shared: Client) -> None:
    thief = WireNode(shared, f"thief-{sandbox.node.name}", gpus=1)
    try:
        told = [_incident(sandbox, 0, "xid_79"), _incident(sandbox, 1, "gpu_not_released")]
        thief.sync(incidents=told, faults=[_incident(sandbox, 2, "xid_31")])
        for index in range(3):
            shown = _gpu(sandbox.client, sandbox, index)
            assert (shown["health"], shown["conditions"]) == ("healthy", [])
            assert _incidents(sandbox.client, sandbox, index) == []
    finally:
        shared.delete(f"/v1/nodes/{thief.id}")
        thief.close()


def test_the_words_of_an_incident_are_for_admins_and_whoever_had_the_gpu(sandbox: Sandbox) -> None:
    with (
        _member_of_a_project(sandbox, "holder") as (holder, _holders_project),
        _member_of_a_project(sandbox, "stranger") as (stranger, _strangers_project),
    ):
        assignment = _run(sandbox, holder, gpus={"count": 8})
        gone = observed(assignment, "exited", exit_code=0)
        uuids = [gpu.uuid for gpu in sandbox.node.gpus]
        told = [_incident(sandbox, 0, "gpu_not_released"), _incident(sandbox, 1, "xid_79")]
        sandbox.sync(gone, incidents=told, faults=[_incident(sandbox, 2, "xid_31", count=7)])
        # It has ended, and its words are still its own.
        paths = [
            "/v1/gpus",
            f"/v1/gpus?node_id={sandbox.node.id}",
            "/v1/nodes",
            f"/v1/nodes/{sandbox.node.id}",
        ]
        paths += [f"/v1/gpus/{uuid}{suffix}" for uuid in uuids[:3] for suffix in ("", "/incidents")]
        for path in paths:
            assert "alice" not in stranger.get(path).text, path
            assert assignment.instance_id not in stranger.get(path).text, path
        assert "alice" not in stranger.get("/v1/events").text
        assert "alice" not in sandbox.client.get("/metrics").text
        shown = _gpu(stranger, sandbox, 0)
        assert (shown["health"], shown["reason"]["code"]) == ("quarantined", "gpu_not_released")
        assert [each["code"] for each in shown["conditions"]] == ["gpu_not_released"]
        assert [each["code"] for each in _incidents(stranger, sandbox, 0)] == ["gpu_not_released"]
        # Faults of its program are nobody else's business at all.
        assert (_gpu(stranger, sandbox, 2)["conditions"], _incidents(stranger, sandbox, 2)) == ([], [])
        for client in (holder, sandbox.client):
            assert SECRET in _gpu(client, sandbox, 0)["reason"]["message"]
            assert SECRET in _incidents(client, sandbox, 0)[0]["message"]
            assert [each["count"] for each in _gpu(client, sandbox, 2)["conditions"]] == [7]
            (incident,) = _incidents(client, sandbox, 2)
            assert (incident["instance_id"], incident["count"]) == (assignment.instance_id, 7)
        assert "alice" in holder.get("/v1/events", params={"limit": 200}).text


def test_of_a_gpu_that_several_projects_have_parts_of_the_words_are_for_admins(sandbox: Sandbox) -> None:
    devices = [
        {"uuid": f"MIG-{sandbox.node.name}-{number}", "profile": "3g.40gb", "memory_mib": 40192}
        for number in range(2)
    ]
    whole = sandbox.node.gpus[0].model_dump()
    cut = GpuFacts.model_validate({**whole, "mig_mode": "enabled", "mig_devices": devices})
    sandbox.node.gpus = [cut]
    sandbox.sync()
    with (
        _member_of_a_project(sandbox, "one") as (one, _one_project),
        _member_of_a_project(sandbox, "two") as (two, _two_project),
    ):
        first, second = (
            _run(sandbox, client, gpus={"count": 1, "mig_profile": "3g.40gb"}) for client in (one, two)
        )
        mig_uuid = first.grants[0].mig_uuid
        # A fault that names its MIG device is that one's; one that does not may be anybody's.
        sandbox.sync(
            *sandbox.ran,
            faults=[
                _incident(sandbox, 0, "xid_31", mig_uuids=[mig_uuid]), _incident(sandbox, 0, "xid_13"),
            ],
        )  # fmt: skip
        assert _told(sandbox, first.instance_id) == [("instance.gpu_fault", "xid_31", "restart_app")]
        assert _told(sandbox, second.instance_id) == []
        # The release gate names the instance whose GPU it looked at.
        mine = _incident(sandbox, 0, "gpu_not_released", instance_id=first.instance_id)
        sandbox.sync(*sandbox.ran, incidents=[mine])
        assert SECRET in one.get(f"/v1/gpus/{cut.uuid}").text
        assert SECRET not in two.get(f"/v1/gpus/{cut.uuid}").text
        # A fatal error of the whole card is told to both, in words of its code.
        sandbox.sync(*sandbox.ran, incidents=[_incident(sandbox, 0, "xid_79")])
        for client, assignment in ((one, first), (two, second)):
            assert ("instance.gpu_unhealthy", "xid_79", "reboot") in _told(sandbox, assignment.instance_id)
            assert SECRET not in client.get(f"/v1/gpus/{cut.uuid}").text
        events = two.get("/v1/events", params={"limit": 200}).text
        assert "instance.gpu_unhealthy" in events
        assert SECRET not in events
        assert SECRET in _gpu(sandbox.client, sandbox, 0)["reason"]["message"]


def test_incidents_come_in_pages(sandbox: Sandbox) -> None:
    codes = ["xid_79", "xid_48", "xid_31"]
    sandbox.sync(incidents=[_incident(sandbox, 0, code) for code in codes])
    path = f"/v1/gpus/{sandbox.node.gpus[0].uuid}/incidents"
    first = sandbox.client.get(path, params={"limit": 2}).json()
    rest = sandbox.client.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [each["code"] for each in (*first["items"], *rest["items"])] == codes[::-1]
    assert rest["next_cursor"] is None
    problem(sandbox.client.get("/v1/gpus/GPU-none/incidents"), 404, "not_found")


def test_what_a_node_calls_a_code_must_be_one(sandbox: Sandbox) -> None:
    odd = ["<script>alert(1)</script>", "x" * 500]
    sandbox.sync(incidents=[_incident(sandbox, index, code) for index, code in enumerate(odd)])
    for index in (0, 1):
        shown = _gpu(sandbox.client, sandbox, index)
        assert (shown["health"], shown["reason"]["code"]) == ("quarantined", "unknown_fault")
