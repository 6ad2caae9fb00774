"""Work in a thread, while the main thread handles signals.

A signal handler of Python may run between any two steps of the main thread, and an exception from it ends
whatever is under way there. So the handlers here do nothing: the number of each signal arrives through a
pipe (`signal.set_wakeup_fd`), and the main thread acts on one after the other.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

Result = TypeVar("Result")


def foreground(act: Callable[[], Result], handlers: Mapping[int, Callable[[], None]]) -> Result:
    """Run a function in a thread, and return its result. Meanwhile, call the handlers of signals in this one.

    For the main thread only. Raises what the function raises, or what a handler raises: then the thread goes
    on, and ends with the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with _numbers_to(writer, handlers):
        work = _Work(act, lambda: os.write(writer, b"\0"))
        while not work.ended:
            for number in os.read(reader, 64):
                if number in handlers:
                    handlers[number]()
    os.close(reader)
    os.close(writer)
    return work.result()


@contextmanager
def _numbers_to(writer: int, handled: Mapping[int, object]) -> Iterator[None]:
    # What is ignored stays so: a shell without job control starts its background commands without Ctrl-C.
    heard = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
    replaced = {number: signal.signal(number, lambda *_: None) for number in heard}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, before in replaced.items():
            signal.signal(number, before)


class _Work(Generic[Result]):
    """A function that runs in a thread.

    Args:
        then: is called after its end.
    """

    def __init__(self, act: Callable[[], Result], then: Callable[[], object]) -> None:
        self.ended = False
        self._act, self._then = act, then
        self._found: list[Result] = []
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="foreground", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._act())
        except BaseException as failure:
            self._failure = failure
        self.ended = True
        self._then()

    def result(self) -> Result:
        if self._failure is not None:
            raise self._failure
        return self._found[0]
