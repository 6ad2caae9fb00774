"""Shared reads: requests for the same content that come while it is read share the next read.

A request never gets content that was read before the request came, so it sees all earlier changes.
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Content = TypeVar("Content")


class SharedReads(Generic[Content]):
    """For each key at most one read that runs and one that waits. For the event loop's thread only."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Content]] = {}
        self._waiting: dict[Hashable, asyncio.Task[Content]] = {}

    async def read(self, key: Hashable, read: Callable[[], Content]) -> Content:
        """Return what `read` returns, called in a thread after this call.

        Args:
            key: requests with the same key get the same content.
        """
        if key not in self._waiting:
            self._waiting[key] = asyncio.create_task(self._read(key, read))
        # If this request is cancelled, others still need the content.
        return await asyncio.shield(self._waiting[key])

    async def _read(self, key: Hashable, read: Callable[[], Content]) -> Content:
        if key in self._running:
            await asyncio.wait({self._running[key]})
        self._running[key] = self._waiting.pop(key)
        try:
            return await run_in_threadpool(read)
        finally:
            del self._running[key]
