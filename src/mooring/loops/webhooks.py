"""Sends events to webhooks: makes deliveries of new events, attempts those that are due, and stores results.

Each tick is one transaction, after which the claimed attempts run in the event loop of another thread. All
control planes may do this at once; usually only the one that leads finds something to do.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from mooring.control import event_order, locks
from mooring.control.tenants.encryption import Encryptor
from mooring.control.webhooks import attempts, fan_out
from mooring.control.webhooks.attempts import Attempt, AttemptResult, RunningAttempts
from mooring.control.webhooks.fan_out import Examined
from mooring.core import webhooks
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops import webhook_mails
from mooring.loops.loop import Loop
from mooring.loops.webhook_mails import MailServer
from mooring.loops.webhook_requests import NotSent, ReceiverAnswer, RequestSender

log = logging.getLogger(__name__)

# Many events share a transaction. Of several replicas, usually one finds deliveries to make.
_BETWEEN_TICKS_S: Final = 0.05
_WITHOUT_RECEIVERS_S: Final = 0.3
_BETWEEN_TICKS_OF_OTHERS_S: Final = 5.0
# Resolving names and sending e-mails block a thread each.
_THREADS: Final = 256
# How far the stored position may be behind, while no webhook wants the events.
_STORE_EVERY: Final = 1000


class Webhooks(Loop):
    topics = (Topic.EVENTS, Topic.WEBHOOKS)
    interval_s = 1.0

    def __init__(
        self,
        database: Database,
        encryptor: Encryptor,
        sender: RequestSender,
        mail_server: MailServer | None = None,
        schedule: Sequence[float] = webhooks.SCHEDULE,
    ) -> None:
        super().__init__(database)
        self._encryptor, self._schedule = encryptor, schedule
        self._attempts = _AttemptThread(sender, mail_server, self.wake)
        self._running = RunningAttempts(Counter(), Counter())
        self._examined_to = 0
        self._has_receivers = True

    def tick(self) -> None:
        results = self._attempts.results()
        self._count((attempt for attempt, _result in results), -1)
        try:
            self._step([result for _attempt, result in results])
        except BaseException:
            self._count((attempt for attempt, _result in results), 1)
            self._attempts.keep(results)
            raise

    def _step(self, results: Sequence[AttemptResult]) -> None:
        with self.database.read() as session:
            complete_to = event_order.complete_to(session)
        with self.database.read() as session:
            stored, skipped_to = fan_out.progress(session), fan_out.position(session, complete_to)
            self._has_receivers = skipped_to is None
            self._examined_to = max(stored, self._examined_to, skipped_to or 0)
            examined = fan_out.examine(session, self._examined_to, complete_to)
            is_due = bool(attempts.due(session, self._running))
        if results or examined.wanted or is_due or examined.to - stored >= _STORE_EVERY:
            examined = self._write(results, examined, complete_to)
        self._examined_to = examined.to
        if examined.has_more or examined.held_back:
            self.wake()

    def _write(self, results: Sequence[AttemptResult], read: Examined, complete_to: float) -> Examined:
        """One transaction: store results, make deliveries, claim attempts. Then the attempts begin."""
        with self.database.write() as session:
            stored = locks.webhooks(session)
            outcomes = attempts.record(session, results, self._schedule)
            examined = read
            if read.wanted:
                # Another control plane may have made these deliveries since they were read.
                examined = fan_out.examine(session, max(stored, self._examined_to), complete_to)
                outcomes["dropped"] += fan_out.fan_out(session, examined)
            fan_out.move_progress(session, examined.to)
            fan_out.count(session, outcomes)
            claimed = attempts.claim(session, self._encryptor, self._running)
        self._count(claimed, 1)
        self._attempts.begin(claimed)
        return examined

    def _count(self, made: Iterable[Attempt], by: int) -> None:
        for attempt in made:
            self._running.of_webhook[attempt.webhook_id] += by
            self._running.of_holder[attempt.holder] += by

    def rest_after(self, cpu_s: float) -> float:
        least_s = _BETWEEN_TICKS_S if self._has_receivers else _WITHOUT_RECEIVERS_S
        least_s = least_s if self.database.leads else _BETWEEN_TICKS_OF_OTHERS_S
        return max(least_s, super().rest_after(cpu_s))

    def start(self) -> None:
        self._attempts.start()
        super().start()

    def stop(self) -> None:
        """End, store the results of attempts that have ended, and let others repeat the rest."""
        super().stop()
        interrupted = self._attempts.stop()
        results = [result for _attempt, result in self._attempts.results()]
        if not (results or interrupted):
            return
        try:
            with self.database.write() as session:
                locks.webhooks(session)
                fan_out.count(session, attempts.record(session, results, self._schedule))
                attempts.release(session, {each.number: each.claim for each in interrupted})
        except Exception:
            # After a minute, their claims expire, and another control plane repeats them.
            log.exception("cannot store the results of the last attempts")


class _AttemptThread:
    """Runs attempts in an event loop, and collects their results."""

    def __init__(
        self, sender: RequestSender, mail_server: MailServer | None, on_result: Callable[[], None]
    ) -> None:
        self._sender, self._mail_server, self._on_result = sender, mail_server, on_result
        self._loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="webhook")
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._loop.run_forever, name="webhook-attempts", daemon=True)
        self._results: deque[tuple[Attempt, AttemptResult]] = deque()
        self._tasks: dict[asyncio.Task[None], Attempt] = {}

    def start(self) -> None:
        self._thread.start()

    def begin(self, claimed: Iterable[Attempt]) -> None:
        for attempt in claimed:
            self._loop.call_soon_threadsafe(self._begin, attempt)

    def _begin(self, attempt: Attempt) -> None:
        task = self._loop.create_task(self._run(attempt))
        self._tasks[task] = attempt
        task.add_done_callback(self._tasks.pop)

    def results(self) -> list[tuple[Attempt, AttemptResult]]:
        """The results since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def keep(self, results: Iterable[tuple[Attempt, AttemptResult]]) -> None:
        """Return results that could not be stored."""
        self._results.extendleft(results)

    def stop(self) -> list[Attempt]:
        """End the thread. Returns the attempts that were interrupted."""
        interrupted = asyncio.run_coroutine_threadsafe(self._interrupt(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
        return interrupted

    async def _interrupt(self) -> list[Attempt]:
        running = dict(self._tasks)
        for task in running:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.gather(*running, return_exceptions=True)
        for resolving in asyncio.all_tasks() - {asyncio.current_task(), *running}:
            resolving.cancel()
        return [attempt for task, attempt in running.items() if not task.done() or task.cancelled()]

    async def _run(self, attempt: Attempt) -> None:
        try:
            result = await self._result(attempt)
        except Exception:
            log.exception("the delivery %s failed", attempt.message_id)
            result = AttemptResult(attempt.number, attempt.claim, error="internal_error")
        self._results.append((attempt, result))
        self._on_result()

    async def _result(self, attempt: Attempt) -> AttemptResult:
        number, claim = attempt.number, attempt.claim
        if attempt.refused is not None:
            return AttemptResult(number, claim, error=attempt.refused)
        try:
            answer = await self._send(attempt)
        except NotSent as error:
            return AttemptResult(number, claim, error=str(error))
        code = answer.code
        if 200 <= code < 300:
            return AttemptResult(number, claim, code)
        problem = "redirected" if 300 <= code < 400 else "rejected"
        return AttemptResult(number, claim, code, problem, answer.retry_after_s, is_gone=code == 410)

    async def _send(self, attempt: Attempt) -> ReceiverAnswer:
        """Raises NotSent."""
        address = webhooks.mail_address(attempt.url)
        if address is None:
            return await self._sender.send(
                attempt.url, attempt.message_id, attempt.secrets, attempt.body, attempt.holder
            )
        if self._mail_server is None:
            raise NotSent("mail_off")
        text, message_id = attempt.body.decode(), attempt.message_id
        return await asyncio.to_thread(webhook_mails.send, self._mail_server, address, message_id, text)
