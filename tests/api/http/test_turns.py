"""Requests that ask the scheduler, that write or that are refused take turns, project by project."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from mooring.api.auth.rate_limits import ANSWERS_PER_S, DELAY_S, MAX_DELAYED, DelayedAnswers
from mooring.api.http.turns import MAX_WAITING_PER_PROJECT, PAUSE_FACTOR, ProjectTurns, SchedulerTurns
from mooring.core.access import Caller
from mooring.core.errors import TooManyRequests


def caller(name: str, project: str | None = None) -> Caller:
    return Caller(name, "key", name, project_id=project)


A, B = caller("a", "project a"), caller("b", "project b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Asking:
    """Requests that take turns; which has it is written down until it is told to end."""

    def __init__(self, turns: SchedulerTurns | ProjectTurns) -> None:
        self._turns = turns
        self.began: list[str] = []
        self._begins: dict[str, asyncio.Event] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.cancels: dict[str, str] = {}  # whom each cancels in the moment in which it gives its turn back

    async def ask(self, name: str, by: Caller) -> None:
        self._begins[name], self._ends[name] = asyncio.Event(), asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._ask(name, by))
        await settle()

    async def _ask(self, name: str, by: Caller) -> None:
        async with self._turns.taken(by):
            self.began.append(name)
            self._begins[name].set()
            await self._ends[name].wait()
        if name in self.cancels:
            self.tasks[self.cancels[name]].cancel()

    async def end(self, name: str, *, cancel: str | None = None) -> None:
        """Let it give its turn back, and cancel another in the same moment."""
        self._ends[name].set()
        if cancel is not None:
            self.tasks[cancel].cancel()
        await settle()

    async def has_begun(self, name: str) -> None:
        await asyncio.wait_for(self._begins[name].wait(), 5)


async def settle() -> None:
    """Let all tasks go on until each waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_a_loop
async def test_one_asks_the_scheduler_at_a_time_and_projects_take_turns() -> None:
    asking = Asking(SchedulerTurns(Clock()))
    for name, by in (("a1", A), ("a2", A), ("a3", A), ("b1", B), ("b2", B)):
        await asking.ask(name, by)
    assert asking.began == ["a1"]
    for name in ("a1", "a2", "b1", "a3"):
        await asking.end(name)
    assert asking.began == ["a1", "a2", "b1", "a3", "b2"]


@in_a_loop
async def test_a_project_rests_after_its_turn_and_others_do_not_wait_for_it() -> None:
    clock = Clock()
    asking = Asking(SchedulerTurns(clock))
    for name, by in (("a1", A), ("a2", A)):
        await asking.ask(name, by)
    clock.now += 0.02
    await asking.end("a1")
    assert asking.began == ["a1"]
    await asking.ask("b1", B)
    assert asking.began == ["a1", "b1"]
    await asking.end("b1")
    clock.now += 0.02 * PAUSE_FACTOR
    await asking.has_begun("a2")


@in_a_loop
async def test_so_many_of_a_project_wait_and_no_more() -> None:
    turns = SchedulerTurns()
    asking = Asking(turns)
    for number in range(MAX_WAITING_PER_PROJECT + 1):
        await asking.ask(f"a{number}", caller(f"key {number}", "project a"))
    with pytest.raises(TooManyRequests) as refused:
        async with turns.taken(A):
            pass
    assert refused.value.code == "too_many_questions"
    await asking.ask("b", B)
    assert len(turns) == MAX_WAITING_PER_PROJECT + 1


@pytest.mark.parametrize("turns", [SchedulerTurns(Clock()), ProjectTurns(1)])
@pytest.mark.parametrize("gone", ["before the turn", "with the turn", "after the turn"])
def test_who_is_gone_keeps_nobody_waiting(turns: SchedulerTurns | ProjectTurns, gone: str) -> None:
    """Whether its client went before the turn came to it, or in the same moment."""

    async def run() -> None:
        asking = Asking(turns)
        for name in ("a1", "a2", "a3"):
            await asking.ask(name, A)
        if gone == "before the turn":
            asking.tasks["a2"].cancel()
        elif gone == "after the turn":
            asking.cancels["a1"] = "a2"
        await asking.end("a1", cancel="a2" if gone == "with the turn" else None)
        await asking.has_begun("a3")
        await asking.end("a3")
        assert len(turns) == 0

    asyncio.run(run())


@in_a_loop
async def test_each_project_has_so_many_turns_at_once() -> None:
    turns = ProjectTurns(2)
    asking = Asking(turns)
    for name, by in (("a1", A), ("a2", A), ("a3", A), ("b1", B)):
        await asking.ask(name, by)
    assert asking.began == ["a1", "a2", "b1"]
    await asking.end("a2")
    assert asking.began == ["a1", "a2", "b1", "a3"]
    for name in ("a1", "a3", "b1"):
        await asking.end(name)
    assert len(turns) == 0


@in_a_loop
async def test_people_of_several_projects_take_turns_of_their_own() -> None:
    asking = Asking(ProjectTurns(1))
    for name in ("ada", "bob"):
        await asking.ask(name, caller(name))
    assert asking.began == ["ada", "bob"]


@in_a_loop
async def test_refusals_of_a_project_are_answered_late_and_at_a_bounded_rate() -> None:
    waited: dict[str, list[float]] = {"project a": [], "project b": []}
    now: list[str] = []

    async def sleep(seconds: float) -> None:
        waited[now[-1]].append(seconds)
        await asyncio.Event().wait()

    async def refuse(key: str) -> None:
        now.append(key)
        await held.wait(key)

    held = DelayedAnswers(sleep)
    async with AsyncExitStack() as stack:
        for key in ["project a"] * (MAX_DELAYED + 1) + ["project b"]:
            stack.callback(asyncio.create_task(refuse(key)).cancel)
        await settle()
        assert waited["project b"] == [DELAY_S]
        # The first second's worth come together, and one too many is not kept at all.
        of_project = waited["project a"]
        assert len(of_project) == MAX_DELAYED
        for second in range(1, MAX_DELAYED // ANSWERS_PER_S):
            assert sum(second - 1 < each <= second for each in of_project) == ANSWERS_PER_S
    await settle()
    assert len(held) == 0
