"""A check that no thread of a service has two connections to the database at once."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event

_THREAD = "thread of the checkout"


@contextmanager
def one_for_each_thread(engine: Engine) -> Iterator[None]:
    """Fail at the end of the block if a thread had two connections of the pool at once.

    Once the pool is empty, threads that wait for a second connection wait for each other. The main thread may
    have several: it is the test's own.
    """
    in_use: Counter[int] = Counter()
    lock = threading.Lock()
    violations: set[str] = set()

    def checked_out(_connection: Any, record: Any, _proxy: Any) -> None:
        thread = threading.current_thread()
        ident = threading.get_ident()
        record.info[_THREAD] = ident
        with lock:
            in_use[ident] += 1
            if in_use[ident] > 1 and thread is not threading.main_thread():
                violations.add(thread.name)

    def checked_in(_connection: Any, record: Any) -> None:
        # Not always the same thread: the garbage collector returns abandoned connections in any thread.
        ident = record.info.pop(_THREAD, None)
        with lock:
            in_use[ident] -= 1

    event.listen(engine, "checkout", checked_out)
    event.listen(engine, "checkin", checked_in)
    yield
    assert not violations, f"threads with two connections to the database at once: {sorted(violations)}"
