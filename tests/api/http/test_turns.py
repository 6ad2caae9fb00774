"""Projects take turns for requests that use the scheduler or write; rejections are delayed per project."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from mooring.api.http.turns import MAX_WAITING_PER_PROJECT, PAUSE_FACTOR, ProjectTurns, SchedulerTurns
from mooring.auth.rate_limits import ANSWERS_PER_S, DELAY_S, MAX_DELAYED, DelayedAnswers
from mooring.core.access import Caller
from mooring_client.errors import TooManyRequests


def caller(name: str, project: str | None = None) -> Caller:
    return Caller(name, "key", name, project_id=project)


A, B = caller("a", "project a"), caller("b", "project b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TurnTakers:
    """Requests that take turns; each keeps its turn until `end`."""

    def __init__(self, turns: SchedulerTurns | ProjectTurns) -> None:
        self._turns = turns
        self.began: list[str] = []
        self._begins: dict[str, asyncio.Event] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        # By request: the request that it cancels right after it has released its turn.
        self.cancels: dict[str, str] = {}

    async def start(self, name: str, by: Caller) -> None:
        self._begins[name], self._ends[name] = asyncio.Event(), asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._take_turn(name, by))
        await settle()

    async def _take_turn(self, name: str, by: Caller) -> None:
        async with self._turns.taken(by):
            self.began.append(name)
            self._begins[name].set()
            await self._ends[name].wait()
        if name in self.cancels:
            self.tasks[self.cancels[name]].cancel()

    async def end(self, name: str, *, cancel: str | None = None) -> None:
        """Let this request release its turn, and cancel the request `cancel` at the same time."""
        self._ends[name].set()
        if cancel is not None:
            self.tasks[cancel].cancel()
        await settle()

    async def has_begun(self, name: str) -> None:
        await asyncio.wait_for(self._begins[name].wait(), 5)


async def settle() -> None:
    """Let all tasks run until each of them waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_a_loop
async def test_one_request_at_a_time_uses_the_scheduler_and_projects_take_turns() -> None:
    requests = TurnTakers(SchedulerTurns(Clock()))
    for name, by in (("a1", A), ("a2", A), ("a3", A), ("b1", B), ("b2", B)):
        await requests.start(name, by)
    assert requests.began == ["a1"]
    for name in ("a1", "a2", "b1", "a3"):
        await requests.end(name)
    assert requests.began == ["a1", "a2", "b1", "a3", "b2"]


@in_a_loop
async def test_a_project_pauses_after_its_turn_without_delaying_others() -> None:
    clock = Clock()
    requests = TurnTakers(SchedulerTurns(clock))
    for name, by in (("a1", A), ("a2", A)):
        await requests.start(name, by)
    clock.now += 0.02
    await requests.end("a1")
    assert requests.began == ["a1"]
    await requests.start("b1", B)
    assert requests.began == ["a1", "b1"]
    await requests.end("b1")
    clock.now += 0.02 * PAUSE_FACTOR
    await requests.has_begun("a2")


@in_a_loop
async def test_the_waiting_requests_of_a_project_are_limited() -> None:
    turns = SchedulerTurns()
    requests = TurnTakers(turns)
    for number in range(MAX_WAITING_PER_PROJECT + 1):
        await requests.start(f"a{number}", caller(f"key {number}", "project a"))
    with pytest.raises(TooManyRequests) as rejected:
        async with turns.taken(A):
            pass
    assert rejected.value.code == "too_many_questions"
    await requests.start("b", B)
    assert len(turns) == MAX_WAITING_PER_PROJECT + 1


@pytest.mark.parametrize("turns", [SchedulerTurns(Clock()), ProjectTurns(1)])
@pytest.mark.parametrize("cancelled", ["before the turn", "with the turn", "after the turn"])
def test_a_cancelled_request_does_not_block_the_next(
    turns: SchedulerTurns | ProjectTurns, cancelled: str
) -> None:
    """The client of a2 may disconnect before a2 gets the turn, at the same time, or right after it."""

    async def run() -> None:
        requests = TurnTakers(turns)
        for name in ("a1", "a2", "a3"):
            await requests.start(name, A)
        if cancelled == "before the turn":
            requests.tasks["a2"].cancel()
        elif cancelled == "after the turn":
            requests.cancels["a1"] = "a2"
        await requests.end("a1", cancel="a2" if cancelled == "with the turn" else None)
        await requests.has_begun("a3")
        await requests.end("a3")
        assert len(turns) == 0

    asyncio.run(run())


@in_a_loop
async def test_the_concurrent_turns_of_a_project_are_limited() -> None:
    turns = ProjectTurns(2)
    requests = TurnTakers(turns)
    for name, by in (("a1", A), ("a2", A), ("a3", A), ("b1", B)):
        await requests.start(name, by)
    assert requests.began == ["a1", "a2", "b1"]
    await requests.end("a2")
    assert requests.began == ["a1", "a2", "b1", "a3"]
    for name in ("a1", "a3", "b1"):
        await requests.end(name)
    assert len(turns) == 0


@in_a_loop
async def test_users_without_a_project_take_separate_turns() -> None:
    requests = TurnTakers(ProjectTurns(1))
    for name in ("ada", "bob"):
        await requests.start(name, caller(name))
    assert requests.began == ["ada", "bob"]


@in_a_loop
async def test_rejections_of_a_project_are_delayed_and_their_rate_is_limited() -> None:
    waited: dict[str, list[float]] = {"project a": [], "project b": []}
    keys: list[str] = []

    async def sleep(seconds: float) -> None:
        waited[keys[-1]].append(seconds)
        await asyncio.Event().wait()

    async def wait_delayed(key: str) -> None:
        keys.append(key)  # `delayed.wait` calls `sleep` at once
        await delayed.wait(key)

    delayed = DelayedAnswers(sleep)
    async with AsyncExitStack() as stack:
        for key in ["project a"] * (MAX_DELAYED + 1) + ["project b"]:
            stack.callback(asyncio.create_task(wait_delayed(key)).cancel)
        await settle()
        assert waited["project b"] == [DELAY_S]
        # An equal number of rejections ends in each second; one over the limit is not delayed at all.
        of_project = waited["project a"]
        assert len(of_project) == MAX_DELAYED
        for second in range(1, MAX_DELAYED // ANSWERS_PER_S):
            assert sum(second - 1 < each <= second for each in of_project) == ANSWERS_PER_S
    await settle()
    assert len(delayed) == 0
