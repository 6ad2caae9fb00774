"""Requests for the same content share a read, but never one that began before they came."""

import asyncio
import threading

import pytest

from mooring.api.http.shared_reads import SharedReads


class Reads:
    """Reads that wait until `release`; the n-th returns n, and the one named `fails` raises KeyError."""

    def __init__(self) -> None:
        self.shared = SharedReads[int]()
        self._began = threading.Semaphore(0)
        self._released = threading.Semaphore(0)
        self._count = 0

    def start(self, key: str = "key") -> asyncio.Task[int]:
        return asyncio.create_task(self.shared.read(key, lambda: self._read(key)))

    def _read(self, key: str) -> int:
        self._count += 1
        number = self._count
        self._began.release()
        assert self._released.acquire(timeout=20)
        if key == "fails":
            raise KeyError(key)
        return number

    async def began(self) -> None:
        assert await asyncio.to_thread(self._began.acquire, timeout=20)

    def release(self, reads: int = 1) -> None:
        self._released.release(reads)


def test_requests_share_the_read_that_begins_after_them() -> None:
    async def check() -> None:
        reads = Reads()
        first = [reads.start(), reads.start()]
        await reads.began()
        second = [reads.start() for _ in range(5)]
        await asyncio.sleep(0)
        reads.release()
        await reads.began()
        third = reads.start()
        await asyncio.sleep(0)
        reads.release(2)
        assert await asyncio.gather(*first, *second, third) == [1, 1, *[2] * 5, 3]
        last = reads.start()
        reads.release()
        assert await last == 4

    asyncio.run(check())


def test_other_keys_do_not_wait() -> None:
    async def check() -> None:
        reads = Reads()
        one = reads.start("one")
        await reads.began()
        other = reads.start("other")
        await reads.began()
        reads.release(2)
        assert sorted(await asyncio.gather(one, other)) == [1, 2]

    asyncio.run(check())


def test_a_failure_and_a_cancelled_request_concern_no_later_read() -> None:
    async def check() -> None:
        reads = Reads()
        cancelled, failing = reads.start("fails"), reads.start("fails")
        await reads.began()
        later = reads.start("fails")
        await asyncio.sleep(0)
        cancelled.cancel()
        reads.release()
        with pytest.raises(KeyError):
            await failing
        await reads.began()
        reads.release()
        with pytest.raises(KeyError):
            await later
        assert cancelled.cancelled()

    asyncio.run(check())
