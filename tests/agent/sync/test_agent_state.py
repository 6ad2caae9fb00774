"""How events change the agent's state, in the orders in which threads can deliver them."""

import pytest

from mooring.agent.decide.reconcile import Remove, Restart, Start, key_of
from mooring.agent.decide.snapshot import ActionKind, Key
from mooring.agent.runtime import Container
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome
from mooring.core.instance.state import Phase, Reason
from mooring.schemas.agent import Assignment, Removal, SyncAnswer
from tests.agent.builders import container, exited, removal, wanted

A1: Key = ("a", 1)
AWAY = Reason(code="docker_unavailable", message="…")


def answer(*things: Assignment | Removal, generation: int = 5, control_plane_id: str = "cpl_1") -> SyncAnswer:
    return SyncAnswer(
        control_plane_id=control_plane_id,
        node_id="nod_1",
        generation=generation,
        report_interval_s=5,
        assignments=[one for one in things if isinstance(one, Assignment)],
        removals=[one for one in things if isinstance(one, Removal)],
    )


def listed(known: AgentState, *containers: Container) -> bool:
    return known.apply_listing(known.begin_listing(), containers, [])


def node(*things: Assignment | Removal | Container) -> AgentState:
    """A node with these containers and this desired state."""
    known = AgentState("cpl_1", 0)
    listed(known, *[one for one in things if isinstance(one, Container)])
    told = [one for one in things if not isinstance(one, Container)]
    assert known.apply_answer(answer(*told), 0) is AnswerOutcome.APPLIED
    return known


def planned(known: AgentState, now: float = 100) -> list[type]:
    """The actions planned now, which are then in progress."""
    plan = known.plan(now)
    assert plan is not None
    for action in plan.actions:
        if isinstance(action, Start):
            known.begin_work(key_of(action.assignment), ActionKind.START, action.assignment.gpu_uuids)
        elif isinstance(action, Restart | Remove):
            kind = ActionKind.RESTART if isinstance(action, Restart) else ActionKind.REMOVE
            known.begin_work(key_of(action.container), kind, action.container.gpu_uuids)
    return [type(action) for action in plan.actions]


def phases(known: AgentState) -> dict[Key, Phase]:
    return {(one.instance_id, one.attempt): one.phase for one in known.reported_state().instances or ()}


def test_plans_nothing_before_an_answer_and_a_listing() -> None:
    known = AgentState("cpl_1", 0)
    assert known.plan(0) is None
    known.apply_answer(answer(wanted()), 0)
    assert known.plan(0) is None
    assert known.reported_state().instances is None
    listed(known)
    assert known.plan(0) is not None


@pytest.mark.parametrize(
    ("generation", "highest_when_asked", "outcome"),
    [
        (6, 5, AnswerOutcome.APPLIED),
        (5, 5, AnswerOutcome.APPLIED),
        (4, 3, AnswerOutcome.OUTDATED),  # its question was asked before generation 5 was heard
        (4, 5, AnswerOutcome.REJECTED),
    ],
)
def test_generations(generation: int, highest_when_asked: int, outcome: AnswerOutcome) -> None:
    known = node()
    assert known.apply_answer(answer(wanted(), generation=generation), highest_when_asked) is outcome
    assert (known.reported_state().generation, bool(known.rejection)) == (
        max(generation, 5),
        outcome is AnswerOutcome.REJECTED,
    )
    assert planned(known) == ([Start] if outcome is AnswerOutcome.APPLIED else [])


def test_a_foreign_control_plane_is_rejected_whatever_its_generation() -> None:
    known = node()
    assert (
        known.apply_answer(answer(wanted(), generation=99, control_plane_id="cpl_2"), 5)
        is AnswerOutcome.REJECTED
    )
    assert (known.highest_generation, planned(known)) == (5, [])
    assert known.apply_answer(answer(wanted()), 5) is AnswerOutcome.APPLIED
    assert known.rejection is None


def test_a_listing_made_while_a_start_ended_does_not_undo_it() -> None:
    known = node(wanted())
    planned(known)
    number = known.begin_listing()
    known.started(A1, container())
    assert known.apply_listing(number, [], []) is True  # and asks for another listing
    assert phases(known) == {A1: Phase.RUNNING}
    assert listed(known) is False
    assert phases(known) == {}


def test_a_listing_made_while_a_removal_ended_does_not_bring_it_back() -> None:
    known = node(removal(), exited())
    assert planned(known) == [Remove]
    number = known.begin_listing()
    known.removed(A1)
    known.apply_listing(number, [exited()], [])
    assert phases(known) == {}


def test_a_start_that_ended_while_the_engine_was_unavailable_counts() -> None:
    known = node(wanted())
    planned(known)
    number = known.begin_listing()
    known.engine_unavailable()
    known.started(A1, container())
    known.apply_listing(number, [], [])
    assert phases(known) == {A1: Phase.RUNNING}


def test_after_a_restart_nothing_is_done_until_a_later_listing_shows_it() -> None:
    known = node(wanted(spec={"restart": "always"}), exited())
    assert planned(known) == []
    assert planned(known, now=101) == [Restart]
    number = known.begin_listing()
    known.await_listing(A1)
    assert planned(known, now=200) == []
    known.apply_listing(number, [exited()], [])
    assert planned(known, now=200) == []
    assert phases(known) == {A1: Phase.STARTING}
    listed(known, container())
    assert phases(known) == {A1: Phase.RUNNING}


def test_failures_are_retried_with_growing_pauses() -> None:
    known, now, pauses = node(wanted()), 100.0, []
    for _ in range(7):
        assert planned(known, now) == [Start]
        known.failed(A1, AWAY, now)
        assert planned(known, now) == []
        listed(known)
        plan = known.plan(now)
        assert plan is not None and plan.due is not None
        assert phases(known) == {A1: Phase.STARTING}
        pauses.append(plan.due - now)
        now = plan.due
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_what_has_run_is_not_started_again_by_an_older_answer() -> None:
    known = node(wanted())
    planned(known)
    known.started(A1, container())
    listed(known)  # it was removed behind our back
    known.apply_answer(answer(wanted()), 5)  # made before the control plane heard that it runs
    assert planned(known) == []


def test_a_refusal_is_forgotten_with_its_assignment() -> None:
    known = node(wanted())
    planned(known)
    known.refused(A1, Reason(code="image_not_found", message="…"))
    assert (phases(known), planned(known)) == ({A1: Phase.REFUSED}, [])
    known.apply_answer(answer(removal(), generation=6), 5)
    assert phases(known) == {}


def test_containers_that_the_engines_restart_killed() -> None:
    known = node(wanted("a"), wanted("b"), container("a"), container("b"), exited("c", exit_code=137))
    known.engine_unavailable()
    known.engine_unavailable()
    listed(known, exited("a", exit_code=137), exited("b", exit_code=0), exited("c", exit_code=137))
    reasons = {
        one.instance_id: one.reason and one.reason.code for one in known.reported_state().instances or ()
    }
    assert reasons == {"a": "runtime_restarted", "b": None, "c": "killed"}
