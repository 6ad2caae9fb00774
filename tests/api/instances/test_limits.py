"""Time limits that stop instances: maximum duration, deadline of a drain, start timeout."""

from datetime import timedelta

from sqlalchemy import update

from mooring.db.tables import Instance
from mooring.db.types import now
from tests.api.conftest import Sandbox
from tests.nodes import observed
from tests.testbed.waiting import wait_until


def _state(sandbox: Sandbox, instance_id: str) -> tuple[str, str | None]:
    shown = sandbox.client.instance(instance_id)
    return shown["state"], (shown["reason"] or {}).get("code")


def test_an_instance_is_stopped_at_its_maximum_duration(sandbox: Sandbox) -> None:
    assignment = sandbox.running(max_duration_s=1)
    shown = sandbox.client.instance(assignment.instance_id)
    assert shown["expires_at"] > shown["started_at"]
    wait_until(lambda: _state(sandbox, assignment.instance_id) == ("stopping", "max_duration_reached"))
    assert sandbox.assignment(assignment.instance_id).want == "stopped"
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    ended = sandbox.client.instance(assignment.instance_id)
    assert (ended["state"], ended["reason"]["code"]) == ("stopped", "max_duration_reached")
    assert ended["expires_at"] is None


def test_the_duration_of_a_pending_instance_does_not_run(sandbox: Sandbox) -> None:
    made = sandbox.create(max_duration_s=1, gpus={"count": 60})
    assert sandbox.client.instance(made["id"])["expires_at"] is None
    placed = sandbox.placed(max_duration_s=1)
    assert sandbox.client.instance(placed.instance_id)["expires_at"] is None


def test_the_deadline_of_a_drain_stops_the_remaining_instances(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path = f"/v1/nodes/{sandbox.node.id}"
    drained = sandbox.client.post(f"{path}/drain", json={"deadline_s": 3600}).json()
    assert (drained["state"], drained["draining"]) == ("draining", True)
    assert drained["drain_deadline_at"] is not None
    assert _state(sandbox, assignment.instance_id) == ("running", None)
    sandbox.client.post(f"{path}/drain", json={"deadline_s": 0})
    wait_until(lambda: _state(sandbox, assignment.instance_id) == ("stopping", "node_drained"))


def test_a_drain_without_a_deadline_stops_nothing_and_uncordon_ends_it(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path = f"/v1/nodes/{sandbox.node.id}"
    drained = sandbox.client.post(f"{path}/drain").json()
    assert (drained["state"], drained["drain_deadline_at"]) == ("draining", None)
    waiting = sandbox.create()
    wait_until(lambda: _state(sandbox, waiting["id"])[1] == "waiting_for_capacity")
    assert _state(sandbox, assignment.instance_id) == ("running", None)
    uncordoned = sandbox.client.post(f"{path}/uncordon").json()
    assert (uncordoned["state"], uncordoned["draining"], uncordoned["cordoned"]) == ("ready", False, False)
    sandbox.client.wait(waiting["id"], "scheduled")


def test_an_instance_that_exceeds_the_start_timeout_is_stopped(sandbox: Sandbox) -> None:
    slow = sandbox.placed()
    started = sandbox.running()
    sandbox.sync(
        observed(slow, "starting", reason={"code": "pulling", "message": "1 of 9 layers"}),
        observed(started, "running"),
    )
    assert _state(sandbox, slow.instance_id) == ("starting", "pulling")
    placed_at = now() - timedelta(seconds=sandbox.service.plane.settings.start_timeout_s + 1)
    with sandbox.service.plane.database.write() as session:
        ids = [slow.instance_id, started.instance_id]
        session.execute(update(Instance).where(Instance.id.in_(ids)).values(scheduled_at=placed_at))
    wait_until(lambda: _state(sandbox, slow.instance_id) == ("stopping", "start_timeout"))
    for _ in range(2):  # the answer to the first report has the stop, the second report confirms it
        sandbox.sync(observed(started, "running"))
    assert _state(sandbox, slow.instance_id) == ("stopped", "start_timeout")
    assert _state(sandbox, started.instance_id) == ("running", None)
