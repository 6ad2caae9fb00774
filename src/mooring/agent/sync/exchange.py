"""Sends reports to the control plane and receives the desired state, in two tasks.

    poll task   sync(wait_s = report interval) ── answered at a change, or when the wait is over ──┐
    push task   sync(wait_s = 0), whenever something changed on this node ─────────────────────────┤
                                                                                                 on_answer

Every report is complete and has a new, higher `seq`, so any call may fail and none needs to be cancelled.
If nothing has changed since a confirmed report, a heartbeat is sent instead (`confirmed_report.py`).
If the agent already has the current desired state, answers to the push task omit it (`brief`).
"""

import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from mooring.agent.sync.agent_state import AnswerOutcome
from mooring.agent.sync.client import (
    SESSION_CALL,
    ControlPlaneClient,
    ControlPlaneError,
    CredentialRejected,
    RequestRejected,
    SessionTaken,
    Unreachable,
    heartbeat_call,
    sync_call,
)
from mooring.agent.sync.confirmed_report import ConfirmedReport
from mooring.agent.sync.reachability import Reachability
from mooring.agent.sync.tasks import Signal, Tasks
from mooring.core.backoff import Backoff
from mooring.schemas.agent import Heartbeat, HeartbeatAnswer, SessionAnswer, SyncAnswer, SyncRequest

EXIT_SESSION_TAKEN: Final = 3
EXIT_UNAUTHORIZED: Final = 4

LONGEST_PAUSE_S: Final = 5.0
LONGEST_WAIT_S: Final = 55.0  # the protocol allows 60
NO_CHANGE_PAUSE_S: Final = 0.1
# The threads that start containers go first: making the next report at once would compete for the
# interpreter's lock, which delayed a start by a millisecond.
CHANGE_PAUSE_S: Final = 0.002

log = logging.getLogger(__name__)


def new_backoff() -> Backoff:
    """A backoff with jitter, so that the nodes of a fleet do not retry at the same time."""
    return Backoff(0.2, LONGEST_PAUSE_S, partial(random.uniform, 0.5, 1))


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """A request, the highest generation known when it was made, and the time of that (`SelfFence.now`)."""

    request: SyncRequest
    highest_generation: int
    made_at: float


class Exchange:
    """Two tasks, from `start` until `ended` is set.

    Args:
        node: names this node among those that share `reachability`.
        on_session: receives the session before the first report; returns False to reject it.
        make_report: makes a report of the present state; its arguments are `wait_s` and `brief`.
        on_answer: applies an answer.
        on_heartbeat: receives when the report would have been made (`ReportRequest.made_at`), and the answer;
            called when a heartbeat was stored.
        renew_credential: fetches a new credential; called when an answer asks for that.
        on_first_call: called after the first report, whether or not it was answered.
        end: called with the exit code when this agent may no longer act for its node.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        tasks: Tasks,
        *,
        node: str,
        reachability: Reachability,
        on_session: Callable[[SessionAnswer], Awaitable[bool]],
        make_report: Callable[[float, bool], ReportRequest],
        on_answer: Callable[[ReportRequest, SyncAnswer], AnswerOutcome],
        on_heartbeat: Callable[[float, HeartbeatAnswer], None],
        renew_credential: Callable[[], None],
        on_first_call: Callable[[], None],
        end: Callable[[int], None],
        ended: Signal,
    ) -> None:
        self._control_plane, self._tasks = control_plane, tasks
        self._node, self._reachability = node, reachability
        self._on_session, self._make_report, self._on_answer = on_session, make_report, on_answer
        self._on_heartbeat, self._on_first_call = on_heartbeat, on_first_call
        self._renew_credential, self._end, self._ended = renew_credential, end, ended
        self._interval_s = LONGEST_PAUSE_S
        self._due: float | None = None
        self._pushed_at = 0.0
        self._due_lock = threading.Lock()  # of `_due`
        self._due_changed = tasks.signal()
        self._rejected = self._renewal_failed = False
        self._confirmed = ConfirmedReport()
        self._started: list[Signal] = []  # for each task, set at its end

    def start(self) -> None:
        self._started.append(self._tasks.start(self._poll, "poll"))

    async def wait_for_calls(self, timeout_s: float) -> None:
        """After the end: give calls in progress time to be answered."""
        until = time.monotonic() + timeout_s
        for task_ended in self._started:
            await task_ended.wait(max(0, until - time.monotonic()))

    def report_soon(self, *, immediate: bool = True) -> None:
        """Report now; if not immediate, at most once a second."""
        due = 0.0 if immediate else self._pushed_at + 1
        with self._due_lock:
            self._due = due if self._due is None else min(due, self._due)
        self._due_changed.set()

    def wake(self) -> None:
        """Let the push task see that `ended` is set."""
        self._due_changed.set()

    async def _poll(self) -> None:
        backoff = new_backoff()
        while not self._ended.is_set() and not await self._open_session():
            await self._ended.wait(backoff.pause_s())
        backoff.reset()
        self._started.append(self._tasks.start(self._push, "push"))
        wait_s, is_first = 0.0, True
        while not self._ended.is_set():
            succeeded = await self._call_and_pause(wait_s)
            if is_first:
                self._on_first_call()
                is_first = False
            if succeeded:
                backoff.reset()
                wait_s = self._interval_s * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
            else:
                wait_s = 0.0
                await self._ended.wait(backoff.pause_s())

    async def _call_and_pause(self, wait_s: float) -> bool:
        """Whether the call succeeded. Pauses after a change, or if an answer without one came too early."""
        began = time.monotonic()
        changed = await self._call(wait_s)
        if changed:
            await self._ended.wait(CHANGE_PAUSE_S)
        elif changed is False and time.monotonic() - began < wait_s / 2:
            await self._ended.wait(NO_CHANGE_PAUSE_S)
        return changed is not None

    async def _push(self) -> None:
        backoff = new_backoff()
        while await self._wait_until_due():
            if await self._call(0, brief=True) is None:
                await self._ended.wait(backoff.pause_s())
                self.report_soon()
            else:
                backoff.reset()

    async def _wait_until_due(self) -> bool:
        """True when a report is due; False at the end."""
        while True:
            self._due_changed.clear()  # before the checks, so that nothing is missed
            if self._ended.is_set():
                return False
            with self._due_lock:
                left_s = None if self._due is None else self._due - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._due, self._pushed_at = None, time.monotonic()
                    return True
            await self._due_changed.wait(left_s)

    async def _open_session(self) -> bool:
        sent_at = time.monotonic()
        try:
            answer = await self._control_plane.awaited(SESSION_CALL)
        except ControlPlaneError as error:
            self._failed(error)
            return False
        self._succeeded(sent_at)
        return await self._on_session(answer)

    async def _call(self, wait_s: float, *, brief: bool = False) -> bool | None:
        """Send a report. Returns whether the answer has a change; None: there is no accepted answer."""
        report = await self._tasks.call(lambda: self._make_report(min(wait_s, LONGEST_WAIT_S), brief))
        if (heartbeat := self._confirmed.instead_of(report.request)) is not None:
            return await self._send_heartbeat(heartbeat, report.made_at)
        sent_at = time.monotonic()
        try:
            answer = await self._control_plane.awaited(sync_call(report.request))
        except ControlPlaneError as error:
            self._failed(error)
            return None
        if self._ended.is_set():
            return None
        self._succeeded(sent_at)
        self._interval_s = answer.report_interval_s
        if answer.renew_credential:
            await self._tasks.call(self._renew)
        outcome = await self._tasks.call(lambda: self._on_answer(report, answer))
        if outcome is AnswerOutcome.REJECTED:
            self._confirmed.forget()
            return None
        self._confirmed.confirmed(report.request, answer)
        return answer.generation != report.request.generation or bool(answer.streams)

    async def _send_heartbeat(self, heartbeat: Heartbeat, made_at: float) -> bool | None:
        """As `_call`: a report that is wanted counts as a change, so it is sent at once."""
        sent_at = time.monotonic()
        try:
            answer = await self._control_plane.awaited(heartbeat_call(heartbeat))
        except ControlPlaneError as error:
            if isinstance(error, RequestRejected) and not isinstance(error, CredentialRejected):
                self._confirmed.forget()
                return True  # another replica, of an earlier release, does not have this call
            # The next call is a heartbeat again: the control plane knows whether it needs a report instead.
            # Reports of all nodes after an outage would be ten times the work.
            self._failed(error)
            return None
        if self._ended.is_set():
            return None
        self._succeeded(sent_at)
        self._interval_s = answer.report_interval_s
        if answer.report_wanted:
            self._confirmed.forget()
        else:
            await self._tasks.call(lambda: self._on_heartbeat(made_at, answer))
        return answer.report_wanted

    def _renew(self) -> None:
        try:
            self._renew_credential()
        except (ControlPlaneError, OSError) as error:  # OSError: the disk is full
            if not self._renewal_failed:
                log.warning("cannot renew the credential (%s); retrying with the next report", error)
            self._renewal_failed = True
        else:
            self._renewal_failed = False

    def _failed(self, error: ControlPlaneError) -> None:
        if self._ended.is_set():
            return
        if isinstance(error, SessionTaken):
            log.critical("another agent with this node's identity has taken over; containers keep running")
            self._end(EXIT_SESSION_TAKEN)
        elif isinstance(error, CredentialRejected):
            log.critical("the control plane rejected this node's credential; join it again with a new token")
            self._end(EXIT_UNAUTHORIZED)
        elif isinstance(error, Unreachable):
            self._reachability.failed(self._node, error)
        elif not self._rejected:
            self._rejected = True
            log.warning("the control plane rejects this node's calls (%s); retrying", error)

    def _succeeded(self, sent_at: float) -> None:
        self._reachability.succeeded(self._node, sent_at)
        if self._rejected:
            self._rejected = False
            log.info("the control plane accepts this node's calls again")
