"""Threads for blocking calls: as many as needed, no more than allowed."""

import logging
import threading

import pytest

from mooring.agent.workers import Workers
from tests.testbed.waiting import wait_until


def test_does_everything_at_most_so_many_at_a_time() -> None:
    workers, gate, lock = Workers("w", 3), threading.Event(), threading.Lock()
    running, most, done = 0, 0, 0

    def task() -> None:
        nonlocal running, most, done
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(10)
        with lock:
            running -= 1
            done += 1

    for _ in range(10):
        workers.submit(task)
    wait_until(lambda: running == 3)
    gate.set()
    wait_until(lambda: done == 10)
    assert most == 3


def test_uses_a_thread_again() -> None:
    workers, names = Workers("again", 8), []
    for number in range(1, 6):
        workers.submit(lambda: names.append(threading.current_thread().name))
        wait_until(lambda: len(names) == number)  # noqa: B023
        wait_until(lambda: workers._unclaimed == 1)
    assert set(names) == {"again-1"}


def test_outlives_a_task_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("broken")

    workers, done = Workers("w", 1), threading.Event()
    with caplog.at_level(logging.ERROR):
        workers.submit(broken)
        workers.submit(done.set)
        assert done.wait(5)
    assert "a task of w failed" in caplog.text
