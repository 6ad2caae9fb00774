"""The event loop of streams: begun from any thread, cancelled, and not ended by a failure."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from mooring.agent.streams.loop import StreamLoop
from tests.testbed.waiting import wait_until


class Waiting:
    """Work that lasts until it is cancelled."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.ended = False

    async def run(self) -> None:
        self.thread = threading.current_thread()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


def test_work_of_all_threads_runs_in_one_thread_until_it_is_cancelled() -> None:
    loop, work = StreamLoop(), [Waiting() for _ in range(20)]
    cancels: list[Callable[[], None]] = []
    threads = [
        threading.Thread(target=lambda each=each: cancels.append(loop.begin(each.run))) for each in work
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(each.thread for each in work))
    assert len({each.thread for each in work}) == 1
    for cancel in cancels:
        cancel()
        cancel()
    wait_until(lambda: all(each.ended for each in work))
    wait_until(lambda: not loop._tasks)


def test_work_that_is_cancelled_at_once_ends() -> None:
    loop, work = StreamLoop(), Waiting()
    loop.begin(work.run)()
    after = Waiting()
    cancel = loop.begin(after.run)
    wait_until(lambda: after.thread)
    wait_until(lambda: len(loop._tasks) == 1)
    cancel()
    wait_until(lambda: not loop._tasks)


def test_a_failure_is_logged_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    loop, after = StreamLoop(), Waiting()

    async def fail() -> None:
        raise ValueError("canary")

    loop.begin(fail)
    cancel = loop.begin(after.run)
    wait_until(lambda: "canary" in caplog.text)
    wait_until(lambda: after.thread)
    cancel()
    wait_until(lambda: after.ended and not loop._tasks)
