"""The decisions of a node: each rule by itself, then all rules on a toy engine, with events in any order."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.agent.decide.reconcile import (
    FENCE_TIMEOUT_S,
    NO_CONTACT,
    Cancel,
    Kill,
    Remove,
    Restart,
    Start,
    Stop,
    is_live,
    key_of,
)
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, Pause, PlannedRestart, Work
from mooring.schemas.agent import Assignment, Removal
from mooring_client.schemas.states import Reason
from tests.agent.builders import ToyEngine, container, decided, exited, removal, snapshot, wanted

GPU = "GPU-0"
A1: Key = ("a", 1)
STARTING = {A1: Work(ActionKind.START)}


def test_starts_what_is_assigned_and_absent() -> None:
    assigned = wanted()
    assert decided(assigned).actions == (Start(assigned),)


def test_never_starts_again_what_has_run() -> None:
    assert decided(wanted(may_start=False)).actions == ()
    assert decided(wanted(), began={A1}).actions == ()


def test_adopts_a_container_that_was_created_and_never_began() -> None:
    assigned = wanted()
    assert decided(assigned, container(status="created")).actions == (Start(assigned),)


@pytest.mark.parametrize("status", ["running", "paused", "restarting"])
def test_a_live_container_that_should_run_is_left_alone(status: str) -> None:
    assert decided(wanted(), container(status=status)).actions == ()


def test_a_stop_keeps_the_ended_container() -> None:
    assigned, running = wanted(want="stopped", stop_timeout_s=9), container()
    assert decided(assigned, running).actions == (Stop(running),)
    assert decided(assigned, exited()).actions == ()


@pytest.mark.parametrize("goal", [wanted(want="stopped", stop_timeout_s=7), removal()])
def test_a_stop_is_followed_by_a_kill_when_its_time_is_over(goal: Assignment | Removal) -> None:
    for now, actions in ((106.9, ()), (107, (Kill(container()),)), (9999, (Kill(container()),))):
        plan = decided(goal, container(), now=now, stop_sent_at={A1: 100.0})
        assert plan.actions == actions, now
        assert plan.due == (107 if now < 107 else None)


def test_a_shorter_timeout_applies_to_a_stop_in_progress() -> None:
    longer, shorter = (wanted(want="stopped", stop_timeout_s=seconds) for seconds in (3600, 3))
    assert decided(longer, container(), now=105, stop_sent_at={A1: 100.0}).actions == ()
    assert decided(shorter, container(), now=105, stop_sent_at={A1: 100.0}).actions == (Kill(container()),)


def test_a_stop_timeout_of_zero_kills_at_once() -> None:
    assigned = wanted(want="stopped", stop_timeout_s=0)
    assert decided(assigned, container()).actions == (Kill(container()),)


REPLACEABLE = {"on_node_loss": "replace", "restart": "always"}


def test_a_fenced_instance_is_stopped_and_not_started_again() -> None:
    assigned = wanted(spec=REPLACEABLE)
    fenced: dict[str, Any] = {"fenced": {A1}, "has_contact": False}
    assert decided(assigned, container(), **fenced).actions == (Stop(container()),)
    late = 100 + FENCE_TIMEOUT_S
    plan = decided(assigned, container(), now=late, stop_sent_at={A1: 100.0}, **fenced)
    assert plan.actions == (Kill(container()),)
    assert decided(assigned, container(), now=105, stop_sent_at={A1: 100.0}, **fenced).due == late
    # Also when the contact is back: the control plane decides what follows.
    due = {A1: PlannedRestart(exited().finished_at, tries=0, pause_s=1, due=0)}
    assert decided(assigned, exited(), restarts=due).actions == (Restart(exited()),)
    assert decided(assigned, exited(), restarts=due, fenced={A1}).actions == ()


def test_a_fenced_instance_is_stopped_by_an_agent_without_assignments() -> None:
    assert decided(container(), fenced={A1}, has_contact=False).actions == (Stop(container()),)


def test_a_fenced_instance_is_removed_when_the_control_plane_says_so() -> None:
    assert decided(removal(), exited(), fenced={A1}).actions == (Remove(exited()),)


def test_nothing_replaceable_begins_without_contact() -> None:
    assigned = wanted(spec=REPLACEABLE)
    plan = decided(assigned, has_contact=False)
    assert (plan.actions, plan.waiting) == ((), {A1: NO_CONTACT})
    assert decided(assigned, has_contact=False, work=STARTING).actions == (Cancel(A1),)
    assert decided(assigned, exited(), now=9999, has_contact=False).actions == ()


def test_other_instances_begin_without_contact() -> None:
    assigned = wanted()
    assert decided(assigned, has_contact=False).actions == (Start(assigned),)


def test_removes_a_created_container_that_should_be_stopped() -> None:
    created = container(status="created")
    assert decided(wanted(want="stopped"), created).actions == (Remove(created),)


def test_a_removal_stops_the_container_first() -> None:
    running, ended = container(), exited()
    assert decided(removal(), running).actions == (Stop(running),)
    assert decided(removal(), ended).actions == (Remove(ended),)
    assert decided(removal()).actions == ()


def test_a_container_that_the_engine_is_removing_is_left_alone() -> None:
    assert decided(removal(), container(status="removing")).actions == ()


@pytest.mark.parametrize("goal", [wanted(want="stopped"), removal()])
def test_cancels_a_start_that_is_no_longer_wanted(goal: Assignment | Removal) -> None:
    assert decided(goal, work=STARTING).actions == (Cancel(A1),)
    cancelled = {A1: Work(ActionKind.START, cancelled=True)}
    assert decided(goal, work=cancelled).actions == ()


def test_cancels_a_start_without_an_assignment() -> None:
    assert decided(work=STARTING).actions == (Cancel(A1),)


def test_an_attempt_has_one_action_at_a_time() -> None:
    stopping = {A1: Work(ActionKind.STOP)}
    assert decided(removal(), container(), work=stopping).actions == ()
    assert decided(wanted(), work=STARTING).actions == ()


def test_never_touches_a_container_that_the_answer_does_not_name() -> None:
    assert decided(container("a"), exited("b")).actions == ()


def test_an_older_attempt_must_be_gone_before_the_newer_one_starts() -> None:
    newer = wanted(attempt=2)
    plan = decided(newer, removal(attempt=1), container(attempt=1))
    assert plan.actions == (Stop(container(attempt=1)),)
    assert plan.waiting[("a", 2)].code == "waiting_for_removal"
    plan = decided(newer, removal(attempt=1), exited(attempt=1))
    assert plan.actions == (Remove(exited(attempt=1)),)
    assert decided(newer).actions == (Start(newer),)


def test_of_two_attempts_only_the_newer_starts() -> None:
    older, newer = wanted(attempt=1), wanted(attempt=2)
    assert decided(older, newer).actions == (Start(newer),)


def test_a_gpu_is_free_only_when_its_container_has_ended() -> None:
    new = wanted("b", gpus=(GPU,))
    holder = container("a", gpu_uuids=(GPU,))
    plan = decided(new, removal("a"), holder)
    assert plan.actions == (Stop(holder),)
    assert "GPU-0" in plan.waiting[("b", 1)].message
    assert decided(new, exited("a", gpu_uuids=(GPU,))).actions == (Start(new),)


def test_a_gpu_of_a_start_in_progress_is_taken() -> None:
    new = wanted("b", gpus=(GPU,))
    plan = decided(new, removal("a"), work={A1: Work(ActionKind.START, (GPU,))})
    assert plan.actions == (Cancel(A1),)
    assert ("b", 1) in plan.waiting


def test_two_assignments_of_one_gpu_do_not_both_start() -> None:
    first, second = wanted("a", gpus=(GPU,)), wanted("b", gpus=(GPU,))
    assert decided(first, second).actions == (Start(first),)


def test_nothing_starts_on_a_node_with_a_problem() -> None:
    problem = Reason(code="toolkit_too_old", message="…")
    plan = decided(wanted(), removal("b"), exited("b"), problem=problem)
    assert plan.actions == (Remove(exited("b")),)
    assert plan.waiting == {A1: problem}


def test_a_failed_action_is_retried_after_a_pause() -> None:
    pause = Pause(tries=0, until=101, reason=Reason(code="docker_unavailable", message="…"), since=100)
    plan = decided(wanted(), pauses={A1: pause})
    assert (plan.actions, plan.waiting, plan.due) == ((), {A1: pause.reason}, 101)
    assert decided(removal(), exited(), pauses={A1: pause}).actions == ()
    assert decided(wanted(), pauses={A1: pause}, now=101).actions != ()


@pytest.mark.parametrize(
    ("policy", "exit_code", "restarts"),
    [("never", 1, False), ("on_failure", 1, True), ("on_failure", 0, False), ("always", 0, True)],
)
def test_restarts_as_the_policy_says(policy: str, exit_code: int, restarts: bool) -> None:
    assigned, ended = wanted(spec={"restart": policy}), exited(exit_code=exit_code)
    plan = decided(assigned, ended)
    assert plan.actions == ()
    assert plan.due == (101 if restarts else None)
    later = decided(assigned, ended, restarts=plan.restarts, now=101)
    assert later.actions == ((Restart(ended),) if restarts else ())


@pytest.mark.parametrize("status", ["created", "exited"])
def test_a_container_starts_only_if_its_gpus_are_free(status: str) -> None:
    """Here the container still has a GPU that its assignment no longer names."""
    assigned = wanted("a", gpus=(), spec={"restart": "always"})
    existing = container("a", status=status, gpu_uuids=(GPU,))
    holder = container("b", gpu_uuids=(GPU,))
    before_the_pause = decided(assigned, existing, holder)
    plan = decided(assigned, existing, holder, restarts=before_the_pause.restarts, now=101)
    assert plan.actions == ()
    assert plan.waiting[A1].code == "waiting_for_removal"


def test_restart_pauses_double_up_to_a_minute_and_reset_after_a_steady_run() -> None:
    assigned, pauses = wanted(spec={"restart": "always"}), []
    restarts: dict[Key, PlannedRestart] = {}
    for number in range(9):
        ended = exited(at=f"2026-11-21T08:00:0{number}Z")
        plan = decided(assigned, ended, restarts=restarts)
        restarts = dict(plan.restarts)
        pauses.append(restarts[A1].pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    running = decided(assigned, container(), restarts=restarts)
    steady = decided(assigned, exited(at="2026-11-21T08:01:00Z"), restarts=running.restarts)
    assert steady.restarts[A1].pause_s == 1


def test_no_restart_of_what_should_be_stopped() -> None:
    plan = decided(wanted(want="stopped", spec={"restart": "always"}), exited())
    assert (plan.actions, plan.restarts, plan.due) == ((), {}, None)


KEYS = [(instance, attempt) for instance in "abc" for attempt in (1, 2)]
STATUSES = ["created", "running", "exited"]


@st.composite
def desires(draw: st.DrawFn) -> AgentSnapshot:
    """A valid desired state: at most one attempt of each instance, and no GPU twice."""
    gpus = ["GPU-0", "GPU-1"]
    items: list[Assignment | Removal] = []
    for instance in "abc":
        attempt = draw(st.sampled_from([None, 1, 2]))
        for other in {1, 2} - {attempt}:
            if draw(st.booleans()):
                items.append(removal(instance, other))
        if attempt is not None:
            taken = gpus[: draw(st.integers(0, len(gpus)))]
            del gpus[: len(taken)]
            want = draw(st.sampled_from(["running", "stopped"]))
            policy = draw(st.sampled_from(["never", "always"]))
            items.append(wanted(instance, attempt, gpus=tuple(taken), want=want, spec={"restart": policy}))
    return snapshot(*items)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_in_any_order_of_events_nothing_runs_twice_or_is_touched_unnamed(data: st.DataObject) -> None:
    present = data.draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(STATUSES)), label="present")
    engine = ToyEngine({key: container(*key, status) for key, status in present.items()})
    goal, named = data.draw(desires()), set[Key]()
    at_first = dict(engine.containers)
    for cycle in range(12):
        if data.draw(st.booleans(), label="new desired state"):
            goal = data.draw(desires())
        named |= goal.assignments.keys() | goal.removals.keys()
        plan = engine.plan(goal, now=cycle * 50.0)
        goal = replace(goal, restarts=plan.restarts)
        _assert_nothing_runs_twice(engine)
        finished = st.sets(st.sampled_from(sorted(engine.work))) if engine.work else st.just(set())
        for key in data.draw(finished):
            engine.finish(key)
            _assert_nothing_runs_twice(engine)
    for key, before in at_first.items():
        assert key in named or engine.containers[key] == before


@settings(max_examples=100, deadline=None)
@given(desires(), st.dictionaries(st.sampled_from(KEYS), st.sampled_from(STATUSES)))
def test_the_node_reaches_the_desired_state(goal: AgentSnapshot, present: dict[Key, str]) -> None:
    engine = ToyEngine({key: container(*key, status) for key, status in present.items()})
    for cycle in range(30):
        plan = engine.plan(goal, now=cycle * 100.0)
        goal = replace(goal, restarts=plan.restarts)
        for key in list(engine.work):
            engine.finish(key)
    assert not engine.work
    assert not goal.removals.keys() & engine.containers.keys()
    have_an_orphan = {instance_id for instance_id, _ in engine.containers.keys() - goal.assignments.keys()}
    for key, assigned in goal.assignments.items():
        found = engine.containers.get(key)
        may_run = present.get(key) != "exited" or assigned.spec.restart == "always"
        if assigned.want == "stopped":
            assert found is None or found.status == "exited"
        elif may_run and assigned.instance_id not in have_an_orphan:
            assert found is not None and found.status == "running"


def _assert_nothing_runs_twice(engine: ToyEngine) -> None:
    """No instance or GPU is used twice by what was started here, whatever was on the node before."""
    live = [one for key, one in engine.containers.items() if is_live(one) and key in engine.began]
    starts = {key: work for key, work in engine.work.items() if work.kind is ActionKind.START}
    gpu_uuids = [uuid for one in live for uuid in one.gpu_uuids]
    gpu_uuids += [uuid for action in starts.values() for uuid in action.gpu_uuids]
    assert len(gpu_uuids) == len(set(gpu_uuids))
    instance_ids = [key_of(one)[0] for one in live] + [instance_id for instance_id, _ in starts]
    assert len(instance_ids) == len(set(instance_ids))
