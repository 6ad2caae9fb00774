"""What a node reports of each attempt."""

from typing import Any

import pytest

from mooring.agent.decide.report import observed, orphans
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, PlannedRestart, Work
from mooring.agent.runtime import Container
from mooring.core.instance.state import Phase
from mooring.schemas.agent import Assignment, Endpoint, ObservedInstance, Removal
from mooring_client.schemas.states import Reason
from tests.agent.builders import container, exited, removal, snapshot, wanted

A1: Key = ("a", 1)
PULLING = Reason(code="pulling_image", message="12 %")


def only(state: AgentSnapshot) -> ObservedInstance:
    """The report of the only attempt in this state."""
    [instance] = observed(state)
    return instance


def phase_and_code(*items: Assignment | Removal | Container, **more: Any) -> tuple[Phase, str | None]:
    instance = only(snapshot(*items, **more))
    return instance.phase, instance.reason.code if instance.reason else None


def test_absent_attempts_are_not_reported() -> None:
    assert observed(snapshot(wanted(), removal("b"))) == []


def test_a_running_container_is_reported_with_all_its_facts() -> None:
    endpoint = Endpoint(container=80, protocol="tcp", host="10.0.0.7", port=32768)
    one = only(snapshot(container(started_at="then", image_digest="sha256:0", endpoints=(endpoint,))))
    assert (one.phase, one.reason, one.exit_code) == (Phase.RUNNING, None, None)
    assert (one.container_id, one.started_at, one.endpoints) == ("c-a-1", "then", [endpoint])


def test_a_start_in_progress_reports_its_progress() -> None:
    work = {A1: Work(ActionKind.START)}
    assert phase_and_code(wanted(), work=work) == (Phase.STARTING, "creating")
    assert only(snapshot(wanted(), work=work, progress={A1: PULLING})).reason == PULLING
    assert phase_and_code(container(), work=work) == (Phase.STARTING, "creating")


def test_a_start_that_waits_or_is_refused_is_reported_with_its_reason() -> None:
    waits = Reason(code="waiting_for_removal", message="…")
    refused = Reason(code="image_not_found", message="…")
    assert phase_and_code(wanted(), waiting={A1: waits}) == (Phase.STARTING, "waiting_for_removal")
    assert phase_and_code(wanted(), refusals={A1: refused}) == (Phase.REFUSED, "image_not_found")


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (exited(exit_code=0), None),
        (exited(exit_code=3), "exited_nonzero"),
        (exited(exit_code=137), "killed"),
        (exited(exit_code=137, oom_killed=True), "oom_killed"),
        (exited(exit_code=None), "exited_nonzero"),
    ],
)
def test_the_reason_of_an_exit(ended: Container, code: str | None) -> None:
    assert phase_and_code(wanted(), ended) == (Phase.EXITED, code)
    assert only(snapshot(wanted(), ended)).exit_code == ended.exit_code


def test_an_exit_that_was_requested_has_no_reason() -> None:
    ended = exited(exit_code=137)
    assert phase_and_code(wanted(want="stopped"), ended) == (Phase.EXITED, None)
    assert phase_and_code(removal(), ended) == (Phase.EXITED, None)


def test_a_kill_by_the_engines_restart_has_its_own_reason() -> None:
    ended = exited(exit_code=137)
    assert phase_and_code(wanted(), ended, killed_by_engine={A1}) == (Phase.EXITED, "runtime_restarted")


def test_an_exit_that_will_be_followed_by_a_restart_is_starting() -> None:
    assigned, ended = wanted(spec={"restart": "always"}), exited(exit_code=3)
    restarts = {A1: PlannedRestart(ended.finished_at, tries=2, pause_s=4, due=0)}
    one = only(snapshot(assigned, ended, restarts=restarts))
    assert one.phase is Phase.STARTING
    assert one.reason == Reason(
        code="restarting", message="The process ended with exit code 3; restart 3 follows 4 s after its end"
    )
    assert phase_and_code(assigned, ended, work={A1: Work(ActionKind.RESTART)}) == (
        Phase.STARTING,
        "restarting",
    )


def test_a_container_that_is_being_removed_is_still_reported() -> None:
    """GPUs are released when the container is gone, not when its removal is requested."""
    assert phase_and_code(removal(), container(status="removing")) == (Phase.RUNNING, None)
    assert phase_and_code(removal(), exited(), work={A1: Work(ActionKind.REMOVE)})[0] is Phase.EXITED


def test_a_created_container_that_may_not_start_has_failed() -> None:
    created = container(status="created")
    assert phase_and_code(wanted(), created) == (Phase.STARTING, "creating")
    assert phase_and_code(wanted(may_start=False), created) == (Phase.EXITED, "never_started")


def test_orphans_are_containers_that_no_answer_names() -> None:
    state = snapshot(wanted("a"), removal("b"), container("a"), container("b"), container("c", 3))
    [orphan] = orphans(state, "cpl_1")
    assert (orphan.instance_id, orphan.name, orphan.control_plane_id) == ("c", "mooring-c-3", "cpl_1")
    assert {one.instance_id for one in observed(state)} == {"a", "b", "c"}


def test_an_orphan_uses_gpus_until_it_has_ended() -> None:
    """The control plane places nothing on them, because this agent would not start it."""
    live = container("a", gpu_uuids=("GPU-1",))
    ended = container("b", status="exited", gpu_uuids=("GPU-2",))
    assert [each.gpu_uuids for each in orphans(snapshot(live, ended), "cpl_1")] == [["GPU-1"], []]
