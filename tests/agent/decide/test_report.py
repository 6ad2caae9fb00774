"""What a node says of each attempt it knows."""

import pytest

from mooring.agent.decide.reconcile import Doing, Key, Restarts, Work
from mooring.agent.decide.report import Known, observed, orphans
from mooring.agent.runtime import Container
from mooring.core.instance import Phase, Reason
from mooring.schemas.agent import Assignment, Endpoint, ObservedInstance, Removal
from tests.agent.worlds import container, exited, removal, wanted

A1: Key = ("a", 1)
PULLING = Reason(code="pulling_image", message="12 %")


def known(*things: Assignment | Removal | Container, **more: object) -> Known:
    def keyed(kind: type) -> dict[Key, object]:
        return {(one.instance_id, one.attempt): one for one in things if isinstance(one, kind)}

    return Known(
        containers=keyed(Container),  # type: ignore[arg-type]
        assignments=keyed(Assignment),  # type: ignore[arg-type]
        removals=keyed(Removal),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def only(facts: Known) -> ObservedInstance:
    [one] = observed(facts)
    return one


def said(facts: Known) -> tuple[Phase, str | None]:
    one = only(facts)
    return one.phase, one.reason.code if one.reason else None


def test_says_nothing_of_what_is_not_there() -> None:
    assert observed(known(wanted(), removal("b"))) == []


def test_a_running_container_with_everything_known_of_it() -> None:
    endpoint = Endpoint(container=80, protocol="tcp", host="10.0.0.7", port=32768)
    one = only(known(container(started_at="then", image_digest="sha256:0", endpoints=(endpoint,))))
    assert (one.phase, one.reason, one.exit_code) == (Phase.RUNNING, None, None)
    assert (one.container_id, one.started_at, one.endpoints) == ("c-a-1", "then", [endpoint])


def test_a_start_under_way_says_how_far_it_is() -> None:
    work = {A1: Work(Doing.START)}
    assert said(known(wanted(), work=work)) == (Phase.STARTING, "creating")
    assert only(known(wanted(), work=work, progress={A1: PULLING})).reason == PULLING
    assert said(known(container(), work=work)) == (Phase.STARTING, "creating")


def test_waiting_and_refused() -> None:
    waits = Reason(code="waiting_for_removal", message="…")
    refused = Reason(code="image_not_found", message="…")
    assert said(known(wanted(), waiting={A1: waits})) == (Phase.STARTING, "waiting_for_removal")
    assert said(known(wanted(), refusals={A1: refused})) == (Phase.REFUSED, "image_not_found")


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
    assert said(known(wanted(), ended)) == (Phase.EXITED, code)
    assert only(known(wanted(), ended)).exit_code == ended.exit_code


def test_a_kill_of_our_own_needs_no_reason() -> None:
    ended = exited(exit_code=137)
    assert said(known(wanted(want="stopped"), ended)) == (Phase.EXITED, None)
    assert said(known(removal(), ended)) == (Phase.EXITED, None)


def test_a_kill_by_the_engines_restart_is_told_from_others() -> None:
    ended = exited(exit_code=137)
    assert said(known(wanted(), ended, engine_ended={A1})) == (Phase.EXITED, "runtime_restarted")


def test_an_exit_that_will_be_followed_by_a_restart_is_starting() -> None:
    asked, ended = wanted(spec={"restart": "always"}), exited(exit_code=3)
    restarts = {A1: Restarts(ended.finished_at, tries=2, pause_s=4, due=0)}
    one = only(known(asked, ended, restarts=restarts))
    assert one.phase is Phase.STARTING
    assert one.reason == Reason(
        code="restarting", message="The process ended with exit code 3; restart 3 follows 4 s after its end"
    )
    assert said(known(asked, ended, work={A1: Work(Doing.RESTART)})) == (Phase.STARTING, "restarting")


def test_what_is_being_removed_is_not_gone() -> None:
    """GPUs are let go of when the container is gone, not when somebody has asked for it."""
    assert said(known(removal(), container(status="removing"))) == (Phase.RUNNING, None)
    assert said(known(removal(), exited(), work={A1: Work(Doing.REMOVE)}))[0] is Phase.EXITED


def test_a_created_container_that_may_not_begin_has_failed() -> None:
    created = container(status="created")
    assert said(known(wanted(), created)) == (Phase.STARTING, "creating")
    assert said(known(wanted(may_start=False), created)) == (Phase.EXITED, "never_started")


def test_orphans_are_what_nobody_spoke_of() -> None:
    facts = known(wanted("a"), removal("b"), container("a"), container("b"), container("c", 3))
    [orphan] = orphans(facts, "cpl_1")
    assert (orphan.instance_id, orphan.name, orphan.control_plane_id) == ("c", "mooring-c-3", "cpl_1")
    assert {one.instance_id for one in observed(facts)} == {"a", "b", "c"}
