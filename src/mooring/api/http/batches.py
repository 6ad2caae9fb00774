"""Batches: concurrent requests that run together, so that they need one transaction and one commit.

A request that comes while nothing runs starts at once, alone. Those that come meanwhile are the next batch.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mooring.api.http.turns import MAX_WAIT_S
from mooring_client.errors import TooManyRequests

MAX_REQUESTS: Final = 32


class Batchable(Protocol):
    """A request that may share a batch with others.

    Attributes:
        project: whose request it is; projects take turns.
        key: two requests with the same key are not in one batch; None: there is no such other request.
    """

    @property
    def project(self) -> str: ...
    @property
    def key(self) -> object | None: ...


Request = TypeVar("Request", bound=Batchable)
Run = Callable[[Sequence[Request]], Sequence[Response | Exception]]


@dataclass(eq=False, slots=True)
class _Waiting(Generic[Request]):
    request: Request
    result: asyncio.Future[Response]


class Batches(Generic[Request]):
    """The requests that wait, and the batches that run. For the event loop's thread only.

    A batch takes requests from the projects in turn, so a project with many requests does not delay others.
    """

    def __init__(self) -> None:
        # By project; the project that was served last is last.
        self._waiting: OrderedDict[str, deque[_Waiting[Request]]] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """The number of requests that wait for a batch."""
        return sum(map(len, self._waiting.values()))

    async def run(self, request: Request, run: Run[Request], max_concurrent: int) -> Response:
        """Run a request in a batch, and return or raise its result.

        Args:
            run: runs a batch in a thread, and returns the result of each of its requests.
            max_concurrent: how many batches may run at the same time.

        Raises:
            TooManyRequests: no batch took it within MAX_WAIT_S.
        """
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(request.project, deque()).append(waiting)
        if len(self._running) < max_concurrent:
            task = asyncio.create_task(self._work(run))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        try:
            done, _pending = await asyncio.wait({waiting.result}, timeout=MAX_WAIT_S)
            if not done and self._withdrawn(waiting):
                raise TooManyRequests("too many requests wait; try again soon", retry_after_s=1)
            return await asyncio.shield(waiting.result)
        except asyncio.CancelledError:
            self._withdrawn(waiting)
            raise

    def _withdrawn(self, waiting: _Waiting[Request]) -> bool:
        """Remove a request; false if a batch has taken it."""
        of_project = self._waiting.get(waiting.request.project, deque())
        if waiting not in of_project:
            return False
        of_project.remove(waiting)
        if not of_project:
            del self._waiting[waiting.request.project]
        return True

    async def _work(self, run: Run[Request]) -> None:
        while batch := self._next():
            results = await run_in_threadpool(run, [waiting.request for waiting in batch])
            for waiting, result in zip(batch, results, strict=True):
                if isinstance(result, Response):
                    waiting.result.set_result(result)
                else:
                    waiting.result.set_exception(result)
                    waiting.result.exception()  # read here, since the request may have been cancelled

    def _next(self) -> Sequence[_Waiting[Request]]:
        """Take the next batch: one request of each project in turn."""
        batch: list[_Waiting[Request]] = []
        later: list[_Waiting[Request]] = []
        keys: set[object] = set()
        while self._waiting and len(batch) < MAX_REQUESTS:
            project, of_project = next(iter(self._waiting.items()))
            self._waiting.move_to_end(project)
            waiting = of_project.popleft()
            if not of_project:
                del self._waiting[project]
            key = waiting.request.key
            (later if key is not None and key in keys else batch).append(waiting)
            keys.add(key)
        for waiting in reversed(later):
            self._waiting.setdefault(waiting.request.project, deque()).appendleft(waiting)
        return batch
