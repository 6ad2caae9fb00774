"""What ends an instance without its user: its longest duration, a drain's deadline, a slow start."""

from tests.api.conftest import Corner
from tests.nodes import seen
from tests.testbed.waiting import wait_until


def _state(corner: Corner, instance_id: str) -> tuple[str, str | None]:
    shown = corner.client.instance(instance_id)
    return shown["state"], (shown["reason"] or {}).get("code")


def test_it_is_stopped_at_its_longest_duration(corner: Corner) -> None:
    assignment = corner.running(max_duration_s=1)
    shown = corner.client.instance(assignment.instance_id)
    assert shown["expires_at"] > shown["started_at"]
    wait_until(lambda: _state(corner, assignment.instance_id) == ("stopping", "max_duration_reached"))
    assert corner.assignment(assignment.instance_id).want == "stopped"
    corner.sync(seen(assignment, "exited", exit_code=143))
    ended = corner.client.instance(assignment.instance_id)
    assert (ended["state"], ended["reason"]["code"]) == ("stopped", "max_duration_reached")
    assert ended["expires_at"] is None


def test_a_duration_does_not_run_while_it_waits(corner: Corner) -> None:
    made = corner.create(max_duration_s=1, gpus={"count": 60})
    assert corner.client.instance(made["id"])["expires_at"] is None
    placed = corner.placed(max_duration_s=1)
    assert corner.client.instance(placed.instance_id)["expires_at"] is None


def test_what_is_left_at_a_drains_deadline_is_stopped(corner: Corner) -> None:
    assignment = corner.running()
    path = f"/v1/nodes/{corner.node.id}"
    drained = corner.client.post(f"{path}/drain", json={"deadline_s": 3600}).json()
    assert (drained["state"], drained["draining"]) == ("draining", True)
    assert drained["drain_deadline_at"] is not None
    assert _state(corner, assignment.instance_id) == ("running", None)
    corner.client.post(f"{path}/drain", json={"deadline_s": 0})
    wait_until(lambda: _state(corner, assignment.instance_id) == ("stopping", "node_drained"))


def test_a_drain_without_a_deadline_stops_nothing_and_uncordon_ends_it(corner: Corner) -> None:
    assignment = corner.running()
    path = f"/v1/nodes/{corner.node.id}"
    drained = corner.client.post(f"{path}/drain").json()
    assert (drained["state"], drained["drain_deadline_at"]) == ("draining", None)
    waiting = corner.create()
    wait_until(lambda: _state(corner, waiting["id"])[1] == "waiting_for_capacity")
    assert _state(corner, assignment.instance_id) == ("running", None)
    freed = corner.client.post(f"{path}/uncordon").json()
    assert (freed["state"], freed["draining"], freed["cordoned"]) == ("ready", False, False)
    corner.client.wait(waiting["id"], "scheduled")


def test_one_that_does_not_start_in_time_is_stopped(corner: Corner) -> None:
    # The shared service has a start timeout of two seconds.
    slow = corner.placed()
    quick = corner.running()
    corner.sync(
        seen(slow, "starting", reason={"code": "pulling", "message": "1 of 9 layers"}), seen(quick, "running")
    )
    assert _state(corner, slow.instance_id) == ("starting", "pulling")
    wait_until(lambda: _state(corner, slow.instance_id) == ("stopping", "start_timeout"))
    corner.sync(seen(quick, "running"))
    corner.sync(seen(quick, "running"))
    assert _state(corner, slow.instance_id) == ("stopped", "start_timeout")
    assert _state(corner, quick.instance_id) == ("running", None)
