"""What a node reports of each attempt."""

import pytest

from mooring.agent.decide.report import observed, orphans
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, PlannedRestart, Work
from mooring.agent.runtime import Container
from mooring.core.instance.state import Phase, Reason
from mooring.schemas.agent import Endpoint, ObservedInstance
from tests.agent.builders import container, exited, removal, snapshot, wanted

A1: Key = ("a", 1)
PULLING = Reason(code="pulling_image", message="12 %")


def only(facts: AgentSnapshot) -> ObservedInstance:
    [one] = observed(facts)
    return one


def said(facts: AgentSnapshot) -> tuple[Phase, str | None]:
    one = only(facts)
    return one.phase, one.reason.code if one.reason else None


def test_absent_attempts_are_not_reported() -> None:
    assert observed(snapshot(wanted(), removal("b"))) == []


def test_a_running_container_is_reported_with_all_its_facts() -> None:
    endpoint = Endpoint(container=80, protocol="tcp", host="10.0.0.7", port=32768)
    one = only(snapshot(container(started_at="then", image_digest="sha256:0", endpoints=(endpoint,))))
    assert (one.phase, one.reason, one.exit_code) == (Phase.RUNNING, None, None)
    assert (one.container_id, one.started_at, one.endpoints) == ("c-a-1", "then", [endpoint])


def test_a_start_in_progress_reports_its_progress() -> None:
    work = {A1: Work(ActionKind.START)}
    assert said(snapshot(wanted(), work=work)) == (Phase.STARTING, "creating")
    assert only(snapshot(wanted(), work=work, progress={A1: PULLING})).reason == PULLING
    assert said(snapshot(container(), work=work)) == (Phase.STARTING, "creating")


def test_waiting_and_refused() -> None:
    waits = Reason(code="waiting_for_removal", message="…")
    refused = Reason(code="image_not_found", message="…")
    assert said(snapshot(wanted(), waiting={A1: waits})) == (Phase.STARTING, "waiting_for_removal")
    assert said(snapshot(wanted(), refusals={A1: refused})) == (Phase.REFUSED, "image_not_found")


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
def test_why_it_ended(ended: Container, code: str | None) -> None:
    assert said(snapshot(wanted(), ended)) == (Phase.EXITED, code)
    assert only(snapshot(wanted(), ended)).exit_code == ended.exit_code


def test_a_kill_of_our_own_needs_no_reason() -> None:
    ended = exited(exit_code=137)
    assert said(snapshot(wanted(want="stopped"), ended)) == (Phase.EXITED, None)
    assert said(snapshot(removal(), ended)) == (Phase.EXITED, None)


def test_a_kill_by_the_engines_restart_has_its_own_reason() -> None:
    ended = exited(exit_code=137)
    assert said(snapshot(wanted(), ended, killed_by_engine={A1})) == (Phase.EXITED, "runtime_restarted")


def test_an_exit_that_will_be_followed_by_a_restart_is_starting() -> None:
    asked, ended = wanted(spec={"restart": "always"}), exited(exit_code=3)
    restarts = {A1: PlannedRestart(ended.finished_at, tries=2, pause_s=4, due=0)}
    one = only(snapshot(asked, ended, restarts=restarts))
    assert one.phase is Phase.STARTING
    assert one.reason == Reason(
        code="restarting", message="The process ended with exit code 3; restart 3 follows 4 s after its end"
    )
    assert said(snapshot(asked, ended, work={A1: Work(ActionKind.RESTART)})) == (Phase.STARTING, "restarting")


def test_what_is_being_removed_is_not_gone() -> None:
    """GPUs are released when the container is gone, not when its removal is requested."""
    assert said(snapshot(removal(), container(status="removing"))) == (Phase.RUNNING, None)
    assert said(snapshot(removal(), exited(), work={A1: Work(ActionKind.REMOVE)}))[0] is Phase.EXITED


def test_a_created_container_that_may_not_begin_has_failed() -> None:
    created = container(status="created")
    assert said(snapshot(wanted(), created)) == (Phase.STARTING, "creating")
    assert said(snapshot(wanted(may_start=False), created)) == (Phase.EXITED, "never_started")


def test_orphans_are_containers_that_no_answer_names() -> None:
    facts = snapshot(wanted("a"), removal("b"), container("a"), container("b"), container("c", 3))
    [orphan] = orphans(facts, "cpl_1")
    assert (orphan.instance_id, orphan.name, orphan.control_plane_id) == ("c", "mooring-c-3", "cpl_1")
    assert {one.instance_id for one in observed(facts)} == {"a", "b", "c"}
