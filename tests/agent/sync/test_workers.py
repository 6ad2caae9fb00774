"""Threads for blocking calls: as many as allowed, shared fairly among their owners."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from mooring.agent.sync.workers import Workers
from tests.testbed.waiting import wait_until


class Tasks:
    """Tasks that run until the gate is opened, and a record of which owners' tasks run."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.done: list[str] = []
        self._lock = threading.Lock()

    def of(self, owner: str) -> Callable[[], None]:
        def task() -> None:
            with self._lock:
                self.running[owner] += 1
                self.most[owner] = max(self.most[owner], self.running[owner])
            self.gate.wait(10)
            with self._lock:
                self.running[owner] -= 1
                self.done.append(owner)

        return task


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


def test_all_tasks_are_run_but_at_most_the_limit_at_a_time(tasks: Tasks) -> None:
    workers = Workers("w", 3)
    for _ in range(10):
        workers.submit(tasks.of("a"))
    wait_until(lambda: tasks.running["a"] == 3)
    tasks.gate.set()
    wait_until(lambda: len(tasks.done) == 10)
    assert tasks.most["a"] == 3
    wait_until(lambda: workers.idle)


def test_an_idle_thread_is_used_again() -> None:
    workers, names = Workers("again", 8), []
    for number in range(1, 6):
        workers.submit(lambda: names.append(threading.current_thread().name))
        wait_until(lambda: len(names) == number)  # noqa: B023
        wait_until(lambda: workers.idle)
    assert set(names) == {"again-1"}


def test_a_failed_task_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("broken")

    workers, done = Workers("w", 1), threading.Event()
    with caplog.at_level(logging.ERROR):
        workers.submit(broken)
        workers.submit(done.set)
        assert done.wait(5)
    assert "a task of w failed" in caplog.text


def test_an_owner_leaves_threads_to_the_others_however_much_it_submits(tasks: Tasks) -> None:
    workers = Workers("w", 4, each=2)
    for _ in range(100):
        workers.submit(tasks.of("greedy"), "greedy")
    wait_until(lambda: tasks.running["greedy"] == 2)
    workers.submit(tasks.of("other"), "other")
    wait_until(lambda: tasks.running["other"] == 1)
    assert tasks.running["greedy"] == 2
    tasks.gate.set()
    wait_until(lambda: len(tasks.done) == 101)
    assert tasks.most["greedy"] == 2


def test_owners_take_turns() -> None:
    workers, gate, order = Workers("w", 1), threading.Event(), list[str]()
    workers.submit(lambda: _wait_for(gate), "first")
    for owner in ("a", "a", "a", "b", "c", "b"):
        workers.submit(partial(order.append, owner), owner)
    gate.set()
    wait_until(lambda: workers.idle)
    assert order == ["a", "b", "c", "a", "b", "a"]


def _wait_for(gate: threading.Event) -> None:
    assert gate.wait(10)


def test_one_task_of_a_subject_runs_at_a_time_and_the_others_hold_no_thread(tasks: Tasks) -> None:
    workers = Workers("w", 3)
    for _ in range(3):
        workers.submit(tasks.of("same"), "a", subject="same")
    workers.submit(tasks.of("another"), "a", subject="another")
    workers.submit(tasks.of("none"), "a")
    wait_until(lambda: tasks.running["another"] and tasks.running["none"])
    assert tasks.running["same"] == 1
    tasks.gate.set()
    wait_until(lambda: len(tasks.done) == 5)
    assert tasks.most["same"] == 1


def test_a_full_queue_of_one_owner_leaves_the_others_open(tasks: Tasks) -> None:
    workers = Workers("w", 1, waiting=2)
    accepted = [workers.submit(tasks.of("a"), "a") is not None for _ in range(4)]
    assert accepted == [True, True, True, False]
    assert not workers.has_room("a")
    assert workers.has_room("b")
    assert workers.submit(tasks.of("b"), "b") is not None
    tasks.gate.set()
    wait_until(lambda: workers.idle)
    assert sorted(tasks.done) == ["a", "a", "a", "b"]


def test_a_queued_task_can_be_withdrawn(tasks: Tasks) -> None:
    workers = Workers("w", 1)
    first, second = workers.submit(tasks.of("a"), "a"), workers.submit(tasks.of("b"), "b")
    assert first is not None
    assert second is not None
    wait_until(lambda: tasks.running["a"])
    assert not workers.withdraw(first)
    assert workers.withdraw(second)
    assert not workers.withdraw(second)
    tasks.gate.set()
    wait_until(lambda: workers.idle)
    assert tasks.done == ["a"]
