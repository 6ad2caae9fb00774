"""Tasks in threads and tasks in an event loop behave alike."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from mooring.agent.sync.tasks import LoopTasks, Signal, Tasks, ThreadTasks, run_blocking


@pytest.fixture(params=[ThreadTasks, LoopTasks])
def tasks(request: pytest.FixtureRequest) -> Tasks:
    made: Tasks = request.param()
    return made


class Outcome:
    """What a task returned."""

    def __init__(self, tasks: Tasks, run: Callable[[], Awaitable[object]]) -> None:
        self._ended = threading.Event()
        self._result: object = None

        async def task() -> None:
            try:
                self._result = await run()
            finally:
                self._ended.set()

        tasks.start(task, "task")

    def result(self) -> object:
        assert self._ended.wait(10)
        return self._result


def test_a_wait_ends_when_the_signal_is_set_even_if_it_is_cleared_at_once(tasks: Tasks) -> None:
    signal, waiting = tasks.signal(), threading.Event()

    async def wait() -> bool:
        waiting.set()
        return await signal.wait()

    async def set_and_clear() -> None:  # in an event loop, nothing can run between the two
        signal.set()
        signal.clear()

    outcome = Outcome(tasks, wait)
    assert waiting.wait(10)
    while not outcome._ended.wait(0.01):  # until the task waits: a set before that is lost
        tasks.start(set_and_clear, "other")
    assert outcome.result() is True


def test_a_wait_ends_with_its_timeout(tasks: Tasks) -> None:
    assert Outcome(tasks, lambda: tasks.signal().wait(0.01)).result() is False


def test_a_wait_for_a_set_signal_is_short(tasks: Tasks) -> None:
    signal = tasks.signal()
    signal.set()
    assert Outcome(tasks, signal.wait).result() is True


def test_the_end_of_a_task_is_a_signal(tasks: Tasks) -> None:
    ended: list[Signal] = []

    async def nothing() -> None:
        return

    async def start_another() -> bool:
        ended.append(tasks.start(nothing, "another"))
        return await ended[0].wait(10)

    assert Outcome(tasks, start_another).result() is True


def test_a_call_returns_or_raises_what_the_function_does(tasks: Tasks) -> None:
    async def calls() -> tuple[int, str]:
        with pytest.raises(ZeroDivisionError):
            await tasks.call(lambda: 1 // 0)
        return await tasks.call(lambda: 7), await tasks.call(lambda: threading.current_thread().name)

    result = Outcome(tasks, calls).result()
    assert isinstance(result, tuple)
    assert result[0] == 7
    assert result[1] != "tasks"  # the event loop's thread waits for no function


def test_a_function_that_waits_does_not_delay_other_tasks() -> None:
    tasks, release = LoopTasks(), threading.Event()
    blocked = Outcome(tasks, lambda: tasks.call(lambda: release.wait(10)))

    async def other() -> int:
        return 7

    assert Outcome(tasks, other).result() == 7
    release.set()
    assert blocked.result() is True


def test_a_task_in_a_thread_cannot_wait_for_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        run_blocking(asyncio.sleep(0))
