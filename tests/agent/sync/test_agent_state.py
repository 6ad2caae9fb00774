"""How events change the agent's state, in the orders in which threads can deliver them."""

import pytest

from mooring.agent.decide.reconcile import Remove, Restart, Start, key_of
from mooring.agent.decide.snapshot import ActionKind, Key
from mooring.agent.runtime import DELAY_LIMIT_S, Container, StartDelayed
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome
from mooring.core.instance.state import Phase
from mooring.schemas.agent import Assignment, Removal, SyncAnswer
from mooring_client.schemas.states import Reason
from tests.agent.builders import container, exited, removal, wanted

A1: Key = ("a", 1)
UNAVAILABLE = Reason(code="docker_unavailable", message="…")


def answer(*things: Assignment | Removal, generation: int = 5, control_plane_id: str = "cpl_1") -> SyncAnswer:
    return SyncAnswer(
        control_plane_id=control_plane_id,
        node_id="nod_1",
        generation=generation,
        report_interval_s=5,
        assignments=[one for one in things if isinstance(one, Assignment)],
        removals=[one for one in things if isinstance(one, Removal)],
    )


def list_containers(state: AgentState, *containers: Container) -> bool:
    return state.apply_listing(state.begin_listing(), containers, [])


def state_after(*things: Assignment | Removal | Container) -> AgentState:
    """The state after a listing of these containers and an answer with this desired state."""
    state = AgentState("cpl_1", 0)
    list_containers(state, *[one for one in things if isinstance(one, Container)])
    desired = [one for one in things if not isinstance(one, Container)]
    assert state.apply_answer(answer(*desired), 0) is AnswerOutcome.APPLIED
    return state


def begin_planned(state: AgentState, now: float = 100) -> list[type]:
    """Begin the work on what is planned now. Returns the types of the actions."""
    plan = state.plan(now)
    assert plan is not None
    for action in plan.actions:
        if isinstance(action, Start):
            state.begin_work(key_of(action.assignment), ActionKind.START, action.assignment.gpu_uuids)
        elif isinstance(action, Restart | Remove):
            kind = ActionKind.RESTART if isinstance(action, Restart) else ActionKind.REMOVE
            state.begin_work(key_of(action.container), kind, action.container.gpu_uuids)
    return [type(action) for action in plan.actions]


def phases(state: AgentState) -> dict[Key, Phase]:
    return {(one.instance_id, one.attempt): one.phase for one in state.reported_state().instances or ()}


def test_plans_nothing_before_an_answer_and_a_listing() -> None:
    state = AgentState("cpl_1", 0)
    assert state.plan(0) is None
    state.apply_answer(answer(wanted()), 0)
    assert state.plan(0) is None
    assert state.reported_state().instances is None
    list_containers(state)
    assert state.plan(0) is not None


@pytest.mark.parametrize(
    ("generation", "highest_when_asked", "outcome"),
    [
        (6, 5, AnswerOutcome.APPLIED),
        (5, 5, AnswerOutcome.APPLIED),
        (4, 3, AnswerOutcome.OUTDATED),  # its request was sent before generation 5 was received
        (4, 5, AnswerOutcome.REJECTED),
    ],
)
def test_an_answer_is_applied_unless_its_generation_is_old(
    generation: int, highest_when_asked: int, outcome: AnswerOutcome
) -> None:
    state = state_after()
    assert state.apply_answer(answer(wanted(), generation=generation), highest_when_asked) is outcome
    assert (state.reported_state().generation, bool(state.rejection)) == (
        max(generation, 5),
        outcome is AnswerOutcome.REJECTED,
    )
    assert begin_planned(state) == ([Start] if outcome is AnswerOutcome.APPLIED else [])


def test_a_foreign_control_plane_is_rejected_whatever_its_generation() -> None:
    state = state_after()
    assert (
        state.apply_answer(answer(wanted(), generation=99, control_plane_id="cpl_2"), 5)
        is AnswerOutcome.REJECTED
    )
    assert (state.highest_generation, begin_planned(state)) == (5, [])
    assert state.apply_answer(answer(wanted()), 5) is AnswerOutcome.APPLIED
    assert state.rejection is None


def test_a_listing_made_while_a_start_ended_does_not_undo_it() -> None:
    state = state_after(wanted())
    begin_planned(state)
    number = state.begin_listing()
    state.started(A1, container())
    assert state.apply_listing(number, [], []) is True  # another listing is needed
    assert phases(state) == {A1: Phase.RUNNING}
    assert list_containers(state) is False
    assert phases(state) == {}


def test_a_listing_made_while_a_removal_ended_does_not_bring_it_back() -> None:
    state = state_after(removal(), exited())
    assert begin_planned(state) == [Remove]
    number = state.begin_listing()
    state.removed(A1)
    state.apply_listing(number, [exited()], [])
    assert phases(state) == {}


def test_a_start_that_ended_while_the_engine_was_unavailable_counts() -> None:
    state = state_after(wanted())
    begin_planned(state)
    number = state.begin_listing()
    state.engine_unavailable()
    state.started(A1, container())
    state.apply_listing(number, [], [])
    assert phases(state) == {A1: Phase.RUNNING}


def test_after_a_restart_nothing_is_planned_until_a_later_listing_shows_its_result() -> None:
    state = state_after(wanted(spec={"restart": "always"}), exited())
    assert begin_planned(state) == []
    assert begin_planned(state, now=101) == [Restart]
    number = state.begin_listing()
    state.await_listing(A1)
    assert begin_planned(state, now=200) == []
    state.apply_listing(number, [exited()], [])
    assert begin_planned(state, now=200) == []
    assert phases(state) == {A1: Phase.STARTING}
    list_containers(state, container())
    assert phases(state) == {A1: Phase.RUNNING}


def test_failures_are_retried_with_growing_pauses() -> None:
    state, now, pauses = state_after(wanted()), 100.0, []
    for _ in range(7):
        assert begin_planned(state, now) == [Start]
        state.failed(A1, UNAVAILABLE, now)
        assert begin_planned(state, now) == []
        list_containers(state)
        plan = state.plan(now)
        assert plan is not None and plan.due is not None
        assert phases(state) == {A1: Phase.STARTING}
        pauses.append(plan.due - now)
        now = plan.due
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def delay_start(state: AgentState, delay: StartDelayed, now: float) -> None:
    list_containers(state)
    assert begin_planned(state, now) == [Start]
    state.delayed(A1, delay, now)
    list_containers(state)
    assert begin_planned(state, now) == []


def test_a_start_that_is_delayed_for_too_long_fails() -> None:
    refusal = Reason(code="image_pull_failed", message="…")
    delay = StartDelayed(Reason(code="registry_unavailable", message="…"), refusal)
    state = state_after(wanted())
    for now in (100.0, 100 + DELAY_LIMIT_S - 10):
        delay_start(state, delay, now)
        assert phases(state) == {A1: Phase.STARTING}
    delay_start(state, delay, 100 + DELAY_LIMIT_S)
    assert (phases(state), begin_planned(state, now=9_999)) == ({A1: Phase.REFUSED}, [])


def test_time_with_another_failure_does_not_count_as_delay() -> None:
    delay = StartDelayed(Reason(code="registry_unavailable", message="…"), Reason(code="x", message="…"))
    state = state_after(wanted())
    delay_start(state, delay, 100)
    delay_start(state, StartDelayed(UNAVAILABLE), 500)
    delay_start(state, delay, 100 + DELAY_LIMIT_S)
    assert phases(state) == {A1: Phase.STARTING}


def test_what_has_run_is_not_started_again_by_an_older_answer() -> None:
    state = state_after(wanted())
    begin_planned(state)
    state.started(A1, container())
    list_containers(state)  # another program has removed the container
    state.apply_answer(answer(wanted()), 5)  # made before the report that it runs
    assert begin_planned(state) == []


def test_a_refusal_is_forgotten_with_its_assignment() -> None:
    state = state_after(wanted())
    begin_planned(state)
    state.refused(A1, Reason(code="image_not_found", message="…"))
    assert (phases(state), begin_planned(state)) == ({A1: Phase.REFUSED}, [])
    state.apply_answer(answer(removal(), generation=6), 5)
    assert phases(state) == {}


def test_an_end_by_a_restart_of_the_engine_has_its_own_reason() -> None:
    state = state_after(wanted("a"), wanted("b"), container("a"), container("b"), exited("c", exit_code=137))
    state.engine_unavailable()
    state.engine_unavailable()
    list_containers(state, exited("a", exit_code=137), exited("b", exit_code=0), exited("c", exit_code=137))
    reasons = {
        one.instance_id: one.reason and one.reason.code for one in state.reported_state().instances or ()
    }
    assert reasons == {"a": "runtime_restarted", "b": None, "c": "killed"}
