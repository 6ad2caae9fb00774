"""Decisions of a node: each rule by itself, then all rules against a toy engine in any order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.agent.decide.reconcile import Cancel, Kill, Remove, Restart, Start, Stop, is_live, key_of
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, Pause, PlannedRestart, Work
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, Removal
from tests.agent.builders import ToyEngine, container, decided, exited, removal, snapshot, wanted

GPU = "GPU-0"
A1: Key = ("a", 1)
STARTING = {A1: Work(ActionKind.START)}


def test_starts_what_is_assigned_and_absent() -> None:
    asked = wanted()
    assert decided(asked).actions == (Start(asked),)


def test_never_starts_again_what_has_run() -> None:
    assert decided(wanted(may_start=False)).actions == ()
    assert decided(wanted(), began={A1}).actions == ()


def test_adopts_a_container_that_was_created_and_never_began() -> None:
    asked = wanted()
    assert decided(asked, container(status="created")).actions == (Start(asked),)


@pytest.mark.parametrize("status", ["running", "paused", "restarting"])
def test_leaves_alone_what_runs_as_it_should(status: str) -> None:
    assert decided(wanted(), container(status=status)).actions == ()


def test_stops_what_should_be_stopped_and_keeps_it() -> None:
    asked, running = wanted(want="stopped", stop_timeout_s=9), container()
    assert decided(asked, running).actions == (Stop(running),)
    assert decided(asked, exited()).actions == ()


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


def test_no_time_to_stop_is_a_kill() -> None:
    asked = wanted(want="stopped", stop_timeout_s=0)
    assert decided(asked, container()).actions == (Kill(container()),)


def test_removes_a_created_container_that_should_be_stopped() -> None:
    created = container(status="created")
    assert decided(wanted(want="stopped"), created).actions == (Remove(created),)


def test_a_removal_stops_first() -> None:
    running, ended = container(), exited()
    assert decided(removal(), running).actions == (Stop(running),)
    assert decided(removal(), ended).actions == (Remove(ended),)
    assert decided(removal()).actions == ()


def test_waits_for_the_engine_to_finish_a_removal_of_its_own() -> None:
    assert decided(removal(), container(status="removing")).actions == ()


@pytest.mark.parametrize("goal", [wanted(want="stopped"), removal()])
def test_cancels_a_start_that_is_no_longer_wanted(goal: Assignment | Removal) -> None:
    assert decided(goal, work=STARTING).actions == (Cancel(A1),)
    cancelled = {A1: Work(ActionKind.START, cancelled=True)}
    assert decided(goal, work=cancelled).actions == ()


def test_cancels_a_start_without_an_assignment() -> None:
    assert decided(work=STARTING).actions == (Cancel(A1),)


def test_one_action_at_a_time() -> None:
    stopping = {A1: Work(ActionKind.STOP)}
    assert decided(removal(), container(), work=stopping).actions == ()
    assert decided(wanted(), work=STARTING).actions == ()


def test_never_touches_a_container_that_the_answer_does_not_name() -> None:
    assert decided(container("stranger"), exited("other")).actions == ()


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


def test_what_failed_because_of_the_engine_waits() -> None:
    pause = Pause(tries=0, until=101, reason=Reason(code="docker_unavailable", message="…"))
    plan = decided(wanted(), pauses={A1: pause})
    assert (plan.actions, plan.waiting, plan.due) == ((), {A1: pause.reason}, 101)
    assert decided(removal(), exited(), pauses={A1: pause}).actions == ()
    assert decided(wanted(), pauses={A1: pause}, now=101).actions != ()


@pytest.mark.parametrize(
    ("policy", "exit_code", "restarts"),
    [("never", 1, False), ("on_failure", 1, True), ("on_failure", 0, False), ("always", 0, True)],
)
def test_restarts_as_the_policy_says(policy: str, exit_code: int, restarts: bool) -> None:
    asked, ended = wanted(spec={"restart": policy}), exited(exit_code=exit_code)
    plan = decided(asked, ended)
    assert plan.actions == ()
    assert plan.due == (101 if restarts else None)
    later = decided(asked, ended, restarts=plan.restarts, now=101)
    assert later.actions == ((Restart(ended),) if restarts else ())


@pytest.mark.parametrize("status", ["created", "exited"])
def test_a_container_starts_only_if_its_gpus_are_free(status: str) -> None:
    """Found by the property below: its assignment no longer names a GPU that the container still has."""
    asked = wanted("a", gpus=(), spec={"restart": "always"})
    made_with = container("a", status=status, gpu_uuids=(GPU,))
    holder = container("b", gpu_uuids=(GPU,))
    waited = decided(asked, made_with, holder)
    plan = decided(asked, made_with, holder, restarts=waited.restarts, now=101)
    assert plan.actions == ()
    assert plan.waiting[A1].code == "waiting_for_removal"


def test_restart_pauses_double_up_to_a_minute_and_reset_after_a_steady_run() -> None:
    asked, pauses = wanted(spec={"restart": "always"}), []
    restarts: dict[Key, PlannedRestart] = {}
    for number in range(9):
        ended = exited(at=f"2026-11-21T08:00:0{number}Z")
        plan = decided(asked, ended, restarts=restarts)
        restarts = dict(plan.restarts)
        pauses.append(restarts[A1].pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    running = decided(asked, container(), restarts=restarts)
    steady = decided(asked, exited(at="2026-11-21T08:01:00Z"), restarts=running.restarts)
    assert steady.restarts[A1].pause_s == 1


def test_no_restart_of_what_should_be_stopped() -> None:
    assert decided(wanted(want="stopped", spec={"restart": "always"}), exited(), now=1000).due is None


KEYS = [(instance, attempt) for instance in "abc" for attempt in (1, 2)]
STATUSES = ["created", "running", "exited"]


@st.composite
def desires(draw: st.DrawFn) -> AgentSnapshot:
    """A valid desired state: at most one attempt of each instance, and no GPU twice."""
    gpus = ["GPU-0", "GPU-1"]
    things: list[Assignment | Removal] = []
    for instance in "abc":
        attempt = draw(st.sampled_from([None, 1, 2]))
        for other in {1, 2} - {attempt}:
            if draw(st.booleans()):
                things.append(removal(instance, other))
        if attempt is not None:
            mine = gpus[: draw(st.integers(0, len(gpus)))]
            del gpus[: len(mine)]
            want = draw(st.sampled_from(["running", "stopped"]))
            policy = draw(st.sampled_from(["never", "always"]))
            things.append(wanted(instance, attempt, gpus=tuple(mine), want=want, spec={"restart": policy}))
    return snapshot(*things)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_order_of_events_keeps_the_rules(data: st.DataObject) -> None:
    present = data.draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(STATUSES)), label="present")
    engine = ToyEngine({key: container(*key, status) for key, status in present.items()})
    goal, touched = data.draw(desires()), set[Key]()
    strangers = dict(engine.containers)
    for now in range(12):
        if data.draw(st.booleans(), label="news"):
            goal = data.draw(desires())
        touched |= goal.assignments.keys() | goal.removals.keys()
        plan = engine.plan(goal, now=float(now * 50))
        goal = replace(goal, restarts=plan.restarts)
        _check(engine)
        for key in data.draw(
            st.sets(st.sampled_from(sorted(engine.work))) if engine.work else st.just(set())
        ):
            engine.finish(key)
            _check(engine)
    for key, before in strangers.items():
        assert key in touched or engine.containers[key] == before


@settings(max_examples=100, deadline=None)
@given(desires(), st.dictionaries(st.sampled_from(KEYS), st.sampled_from(STATUSES)))
def test_it_settles_on_what_is_wanted(goal: AgentSnapshot, present: dict[Key, str]) -> None:
    engine = ToyEngine({key: container(*key, status) for key, status in present.items()})
    for now in range(30):
        plan = engine.plan(goal, now=float(now * 100))
        goal = replace(goal, restarts=plan.restarts)
        for key in list(engine.work):
            engine.finish(key)
    assert not engine.work
    assert not goal.removals.keys() & engine.containers.keys()
    orphaned = {key[0] for key in engine.containers if key not in goal.assignments}
    for key, asked in goal.assignments.items():
        found = engine.containers.get(key)
        if asked.want == "stopped":
            assert found is None or found.status == "exited"
        elif asked.instance_id not in orphaned and (
            present.get(key) != "exited" or asked.spec.restart == "always"
        ):
            assert found is not None and found.status == "running"


def _check(engine: ToyEngine) -> None:
    """No instance started here runs twice or shares a GPU, whatever was on the node before."""
    holders = [one for key, one in engine.containers.items() if is_live(one) and key in engine.began]
    cards = [uuid for one in holders for uuid in one.gpu_uuids]
    cards += [
        uuid for key, work in engine.work.items() if work.kind is ActionKind.START for uuid in work.gpu_uuids
    ]
    assert len(cards) == len(set(cards))
    starting = [key for key, work in engine.work.items() if work.kind is ActionKind.START]
    instances = [key_of(one)[0] for one in holders] + [key[0] for key in starting]
    assert len(instances) == len(set(instances))
