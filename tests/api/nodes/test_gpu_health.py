"""GPU health over HTTP: quarantine, events, and the visibility of messages."""

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

# XID codes after which the GPU must be reset or the node rebooted.
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


def _gpu_events(sandbox: Sandbox, instance_id: str) -> list[tuple[str, str, str]]:
    """The instance's events about its GPUs."""
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
    sandbox.created_ids.append(made["id"])
    client.wait(made["id"], "scheduled")
    assignment = sandbox.assignment(made["id"])
    sandbox.reported.append(observed(assignment, "running"))
    sandbox.sync(*sandbox.reported)
    return assignment


@pytest.mark.parametrize("listed_as", ["incidents", "faults"])
def test_an_application_fault_is_an_event_and_does_not_quarantine(sandbox: Sandbox, listed_as: str) -> None:
    """An agent of an earlier release reports XID 32, 69, 80 and 94 as incidents."""
    assignment = sandbox.running(gpus={"count": 8})
    faults = [_incident(sandbox, 0, f"xid_{code}") for code in (32, 69, 80, 94)]
    sandbox.sync(*sandbox.reported, **{listed_as: faults})
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["reason"], shown["placement"]) == ("healthy", None, "normal")
    assert {each["code"] for each in shown["conditions"]} == {"xid_32", "xid_69", "xid_80", "xid_94"}
    assert {(each["severity"], each["action"]) for each in shown["conditions"]} == {("info", "restart_app")}
    assert sorted(_gpu_events(sandbox, assignment.instance_id)) == [
        ("instance.gpu_fault", f"xid_{code}", "restart_app") for code in (32, 69, 80, 94)
    ]


@pytest.mark.parametrize("code", RESETS_AND_REBOOTS)
def test_an_error_that_needs_a_reset_or_reboot_quarantines_and_is_an_event(
    sandbox: Sandbox, code: int
) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    gpus = [gpu.model_copy(update={"recovery_action": "none"}) for gpu in sandbox.node.gpus]
    sandbox.sync(*sandbox.reported, gpus=gpus, incidents=[_incident(sandbox, 2, f"xid_{code}")])
    shown = _gpu(sandbox.client, sandbox, 2)
    action = "reboot" if code in {79, 151} else "reset"
    assert (shown["health"], shown["reason"]["code"], shown["placement"]) == (
        "quarantined", f"xid_{code}", "none"
    )  # fmt: skip
    assert [(each["code"], each["severity"], each["action"]) for each in shown["conditions"]] == [
        (f"xid_{code}", "fatal", action)
    ]
    assert shown["recovery"] is None
    assert _gpu_events(sandbox, assignment.instance_id) == [("instance.gpu_unhealthy", f"xid_{code}", action)]
    others = [_gpu(sandbox.client, sandbox, index)["health"] for index in (0, 1, 3, 7)]
    assert set(others) == {"healthy"}


@pytest.mark.parametrize(
    ("recovery_action", "health", "placement"),
    [("none", "healthy", "last"), (None, "quarantined", "none"), ("reset_required", "quarantined", "none")],
)
def test_the_recovery_action_decides_errors_that_the_catalogue_does_not(
    sandbox: Sandbox, recovery_action: str | None, health: str, placement: str
) -> None:
    reported = {"recovery_action": recovery_action}
    gpus_reported = [sandbox.node.gpus[0].model_copy(update=reported), *sandbox.node.gpus[1:]]
    sandbox.sync(gpus=gpus_reported, incidents=[_incident(sandbox, 0, "xid_48")])
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
def test_every_recovery_action_quarantines_and_is_an_event(sandbox: Sandbox, fault: str, action: str) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    broken = sandbox.node.gpus[0].model_copy(update={"fault": fault, "recovery_action": fault})
    for _ in range(3):
        sandbox.sync(*sandbox.reported, gpus=[broken, *sandbox.node.gpus[1:]])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["reason"]["code"]) == ("quarantined", fault)
    assert [(each["action"], each["count"]) for each in shown["conditions"]] == [(action, 1)]
    assert _gpu_events(sandbox, assignment.instance_id) == [("instance.gpu_unhealthy", fault, action)]


def test_ten_thousand_application_faults_quarantine_nothing_and_add_few_rows(sandbox: Sandbox) -> None:
    """An agent of an earlier release may report each fault as an incident, 1,000 per report."""
    assignment = sandbox.running(gpus={"count": 8})
    codes = [13, 31, 32, 43, 45, 68, 69, 80, 94, 8]
    before = _count_rows(sandbox)
    for batch in range(10):
        reported = [
            _incident(sandbox, number % 8, f"xid_{codes[number // 100]}", f"{batch}-{number}")
            for number in range(1000)
        ]
        sandbox.sync(*sandbox.reported, incidents=reported)
    for index in range(8):
        shown = _gpu(sandbox.client, sandbox, index)
        assert (shown["health"], shown["placement"]) == ("healthy", "normal")
        assert sum(each["count"] for each in shown["conditions"]) == 1250
        assert sum(each["count"] for each in _incidents(sandbox.client, sandbox, index)) == 1250
    assert len(_gpu_events(sandbox, assignment.instance_id)) == 8 * len(codes)
    added = [count - earlier for count, earlier in zip(_count_rows(sandbox), before, strict=True)]
    assert added == [8 * len(codes)] * 3


def _count_rows(sandbox: Sandbox) -> list[int]:
    """The numbers of conditions, incidents and fault events."""
    uuids = [gpu.uuid for gpu in sandbox.node.gpus]
    with sandbox.service.plane.database.read() as session:
        return [
            session.scalar(select(func.count()).where(GpuCondition.gpu_uuid.in_(uuids))) or 0,
            session.scalar(select(func.count()).where(GpuIncident.gpu_uuid.in_(uuids))) or 0,
            session.scalar(select(func.count()).where(Event.type == "instance.gpu_fault")) or 0,
        ]


def test_stored_incidents_are_limited_and_faults_do_not_displace_hardware_errors(
    sandbox: Sandbox,
) -> None:
    sandbox.sync(incidents=[_incident(sandbox, 0, "xid_79")])
    for number in range(gpu_health.INCIDENTS_KEPT + 50):
        # Faults with the same code within an hour would be counted in one incident.
        _age(sandbox, timedelta(hours=2))
        sandbox.sync(faults=[_incident(sandbox, 0, "xid_31", str(number))])
    found = _incidents(sandbox.client, sandbox, 0, limit=200)
    assert len(found) == gpu_health.INCIDENTS_KEPT + 1
    assert found[-1]["code"] == "xid_79"
    sandbox.sync(faults=[_incident(sandbox, 0, f"fault_{number}") for number in range(200)])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert len(shown["conditions"]) == gpu_health.CONDITIONS_KEPT


def _age(sandbox: Sandbox, age: timedelta) -> None:
    """Move the recorded incidents and conditions of the node's GPUs back in time."""
    uuids = [gpu.uuid for gpu in sandbox.node.gpus]
    with sandbox.service.plane.database.write() as session:
        for table in (GpuCondition, GpuIncident):
            timestamps = {"since": now() - age, "last_at": now() - age}
            session.execute(update(table).where(table.gpu_uuid.in_(uuids)).values(**timestamps))


def test_a_repeated_fatal_error_changes_health_once(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    for number in range(20):
        sandbox.sync(*sandbox.reported, incidents=[_incident(sandbox, 0, "xid_79", str(number))])
    assert len(_gpu_events(sandbox, assignment.instance_id)) == 1
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


def test_pending_row_remapping_is_a_warning_and_the_gpu_is_placed_last(sandbox: Sandbox) -> None:
    remap_pending = sandbox.node.gpus[0].model_copy(update={"conditions": ["row_remap_pending"]})
    for _ in range(2):
        sandbox.sync(gpus=[remap_pending, *sandbox.node.gpus[1:]])
    shown = _gpu(sandbox.client, sandbox, 0)
    assert (shown["health"], shown["placement"]) == ("healthy", "last")
    (condition,) = shown["conditions"]
    del condition["since"], condition["last_at"]
    assert condition == {"code": "row_remap_pending", "severity": "warn", "action": "reset", "count": 1}
    sandbox.node.gpus[0] = remap_pending
    first = sandbox.placed(gpus={"count": 7})
    assert remap_pending.uuid not in first.gpu_uuids
    assert sandbox.placed(gpus={"count": 1}).gpu_uuids == [remap_pending.uuid]  # no other GPU is free
    sandbox.node.gpus[0] = remap_pending.model_copy(update={"conditions": []})
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
        node_ids = [sandbox.client.wait(each, "scheduled")["node_id"] for each in made]
        assert node_ids == [other.id, sandbox.node.id]
    finally:
        for instance_id in made:
            shared.delete(f"/v1/instances/{instance_id}")
        other.sync()
        shared.delete(f"/v1/nodes/{other.id}", params={"force": True})
        other.close()


def test_a_warning_expires_after_a_day_and_a_fatal_error_is_cleared_by_an_admin(sandbox: Sandbox) -> None:
    reported = [_incident(sandbox, 0, code) for code in ("xid_92", "xid_31")]
    sandbox.sync(incidents=[_incident(sandbox, 0, "xid_79")], faults=reported)
    sandbox.sync(faults=[_incident(sandbox, 1, "xid_92")])
    assert [_gpu(sandbox.client, sandbox, index)["placement"] for index in (0, 1)] == ["none", "last"]
    _age(sandbox, timedelta(hours=25))
    with sandbox.service.plane.database.write() as session:
        gpu_health.delete_expired(session)
    shown = [_gpu(sandbox.client, sandbox, index) for index in (0, 1)]
    assert [[each["code"] for each in gpu["conditions"]] for gpu in shown] == [["xid_79"], []]
    assert [gpu["placement"] for gpu in shown] == ["none", "normal"]
    cleared = sandbox.client.post(f"/v1/gpus/{sandbox.node.gpus[0].uuid}/clear").json()
    assert (cleared["health"], cleared["conditions"], cleared["placement"]) == ("healthy", [], "normal")


def test_a_node_cannot_report_incidents_of_another_nodes_gpus(sandbox: Sandbox, shared: Client) -> None:
    thief = WireNode(shared, f"thief-{sandbox.node.name}", gpus=1)
    try:
        reported = [_incident(sandbox, 0, "xid_79"), _incident(sandbox, 1, "gpu_not_released")]
        thief.sync(incidents=reported, faults=[_incident(sandbox, 2, "xid_31")])
        for index in range(3):
            shown = _gpu(sandbox.client, sandbox, index)
            assert (shown["health"], shown["conditions"]) == ("healthy", [])
            assert _incidents(sandbox.client, sandbox, index) == []
    finally:
        shared.delete(f"/v1/nodes/{thief.id}")
        thief.close()


def test_the_message_of_an_incident_is_visible_to_admins_and_the_gpus_project(sandbox: Sandbox) -> None:
    with (
        _member_of_a_project(sandbox, "holder") as (holder, _project),
        _member_of_a_project(sandbox, "outsider") as (outsider, _project),
    ):
        assignment = _run(sandbox, holder, gpus={"count": 8})
        exited = observed(assignment, "exited", exit_code=0)
        uuids = [gpu.uuid for gpu in sandbox.node.gpus]
        reported = [_incident(sandbox, 0, "gpu_not_released"), _incident(sandbox, 1, "xid_79")]
        sandbox.sync(exited, incidents=reported, faults=[_incident(sandbox, 2, "xid_31", count=7)])
        paths = [
            "/v1/gpus",
            f"/v1/gpus?node_id={sandbox.node.id}",
            "/v1/nodes",
            f"/v1/nodes/{sandbox.node.id}",
        ]
        paths += [f"/v1/gpus/{uuid}{suffix}" for uuid in uuids[:3] for suffix in ("", "/incidents")]
        for path in paths:
            assert "alice" not in outsider.get(path).text, path
            assert assignment.instance_id not in outsider.get(path).text, path
        assert "alice" not in outsider.get("/v1/events").text
        assert "alice" not in sandbox.client.get("/metrics").text
        shown = _gpu(outsider, sandbox, 0)
        assert (shown["health"], shown["reason"]["code"]) == ("quarantined", "gpu_not_released")
        assert [each["code"] for each in shown["conditions"]] == ["gpu_not_released"]
        assert [each["code"] for each in _incidents(outsider, sandbox, 0)] == ["gpu_not_released"]
        # Application faults are not visible to other projects at all.
        assert (_gpu(outsider, sandbox, 2)["conditions"], _incidents(outsider, sandbox, 2)) == ([], [])
        # The instance has ended, and its project still sees the messages.
        for client in (holder, sandbox.client):
            assert SECRET in _gpu(client, sandbox, 0)["reason"]["message"]
            assert SECRET in _incidents(client, sandbox, 0)[0]["message"]
            assert [each["count"] for each in _gpu(client, sandbox, 2)["conditions"]] == [7]
            (incident,) = _incidents(client, sandbox, 2)
            assert (incident["instance_id"], incident["count"]) == (assignment.instance_id, 7)
        assert "alice" in holder.get("/v1/events", params={"limit": 200}).text


def test_on_a_gpu_of_several_projects_messages_are_visible_to_admins_only(sandbox: Sandbox) -> None:
    devices = [
        {"uuid": f"MIG-{sandbox.node.name}-{number}", "profile": "3g.40gb", "memory_mib": 40192}
        for number in range(2)
    ]
    whole = sandbox.node.gpus[0].model_dump()
    mig_gpu = GpuFacts.model_validate({**whole, "mig_mode": "enabled", "mig_devices": devices})
    sandbox.node.gpus = [mig_gpu]
    sandbox.sync()
    with (
        _member_of_a_project(sandbox, "one") as (one, _one_project),
        _member_of_a_project(sandbox, "two") as (two, _two_project),
    ):
        first, second = (
            _run(sandbox, client, gpus={"count": 1, "mig_profile": "3g.40gb"}) for client in (one, two)
        )
        mig_uuid = first.grants[0].mig_uuid
        # A fault that names a MIG device belongs to that device's instance; other faults may belong to any.
        sandbox.sync(
            *sandbox.reported,
            faults=[
                _incident(sandbox, 0, "xid_31", mig_uuids=[mig_uuid]), _incident(sandbox, 0, "xid_13"),
            ],
        )  # fmt: skip
        assert _gpu_events(sandbox, first.instance_id) == [("instance.gpu_fault", "xid_31", "restart_app")]
        assert _gpu_events(sandbox, second.instance_id) == []
        # The check after a release names the instance that used the GPU.
        of_first = _incident(sandbox, 0, "gpu_not_released", instance_id=first.instance_id)
        sandbox.sync(*sandbox.reported, incidents=[of_first])
        assert SECRET in one.get(f"/v1/gpus/{mig_gpu.uuid}").text
        assert SECRET not in two.get(f"/v1/gpus/{mig_gpu.uuid}").text
        # A fatal error of the whole GPU is an event for both instances, without the message.
        sandbox.sync(*sandbox.reported, incidents=[_incident(sandbox, 0, "xid_79")])
        for client, assignment in ((one, first), (two, second)):
            assert ("instance.gpu_unhealthy", "xid_79", "reboot") in _gpu_events(
                sandbox, assignment.instance_id
            )
            assert SECRET not in client.get(f"/v1/gpus/{mig_gpu.uuid}").text
        events = two.get("/v1/events", params={"limit": 200}).text
        assert "instance.gpu_unhealthy" in events
        assert SECRET not in events
        assert SECRET in _gpu(sandbox.client, sandbox, 0)["reason"]["message"]


def test_incidents_are_paged(sandbox: Sandbox) -> None:
    codes = ["xid_79", "xid_48", "xid_31"]
    sandbox.sync(incidents=[_incident(sandbox, 0, code) for code in codes])
    path = f"/v1/gpus/{sandbox.node.gpus[0].uuid}/incidents"
    first = sandbox.client.get(path, params={"limit": 2}).json()
    rest = sandbox.client.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [each["code"] for each in (*first["items"], *rest["items"])] == codes[::-1]
    assert rest["next_cursor"] is None
    problem(sandbox.client.get("/v1/gpus/GPU-none/incidents"), 404, "not_found")


def test_an_invalid_incident_code_becomes_unknown_fault(sandbox: Sandbox) -> None:
    invalid = ["<script>alert(1)</script>", "x" * 500]
    sandbox.sync(incidents=[_incident(sandbox, index, code) for index, code in enumerate(invalid)])
    for index in (0, 1):
        shown = _gpu(sandbox.client, sandbox, index)
        assert (shown["health"], shown["reason"]["code"]) == ("quarantined", "unknown_fault")
