"""The two calls that an agent makes: one that waits for news, and one that brings news at once.

    ear     sync(wait_s = report interval) ── answered when there is news, or when the wait is over ──┐
    mouth   sync(wait_s = 0), whenever something changed here ────────────────────────────────────────┤
                                                                                                      take

Both carry the whole truth under one rising `seq`, so either may fail, and neither need be cancelled. While
the desired state is the one of the report, the mouth is answered briefly: the ear hears the whole anyway.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mooring.agent.sync.agent_state import AnswerOutcome
from mooring.agent.sync.client import (
    ControlPlaneClient,
    ControlPlaneError,
    CredentialRejected,
    SessionTaken,
    Unreachable,
)
from mooring.schemas.agent import SessionAnswer, SyncAnswer, SyncRequest

EXIT_SESSION_TAKEN: Final = 3
EXIT_UNAUTHORIZED: Final = 4

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
LONGEST_WAIT_S: Final = 55.0  # the protocol allows 60
NO_NEWS_PAUSE_S: Final = 0.1
# The threads that act on news go first: making the next report would keep the interpreter from them, which
# delayed a start by a millisecond.
NEWS_PAUSE_S: Final = 0.002

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Backoff:
    """Pauses from 0.2 to 5 s, each half by chance, so that a fleet does not come back in one moment."""

    _next_s: float = field(default=FIRST_PAUSE_S)

    def pause_s(self) -> float:
        pause_s, self._next_s = self._next_s, min(LONGEST_PAUSE_S, 2 * self._next_s)
        return pause_s * random.uniform(0.5, 1)  # noqa: S311 - no secret

    def reset(self) -> None:
        self._next_s = FIRST_PAUSE_S


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """A request, and the newest generation known when it was made."""

    request: SyncRequest
    highest: int


class Exchange:
    """Two threads, from `start` until `ended` is set.

    Args:
        opened: told the session's number before the first report; False if it is another control plane's.
        make: the report of now; its arguments become `wait_s` and `brief`.
        take: what becomes of an answer.
        renew: fetches a new credential, as the answer asked.
        end: called with the exit code when this agent may no longer speak for its node.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        *,
        opened: Callable[[SessionAnswer], bool],
        make: Callable[[float, bool], ReportRequest],
        take: Callable[[ReportRequest, SyncAnswer], AnswerOutcome],
        renew: Callable[[], None],
        end: Callable[[int], None],
        ended: threading.Event,
    ) -> None:
        self._control_plane = control_plane
        self._opened, self._make, self._take, self._end = opened, make, take, end
        self._renew = renew
        self._ended = ended
        self._interval_s = LONGEST_PAUSE_S
        self._due: float | None = None
        self._spoke_at = 0.0
        self._something_to_say = threading.Condition()
        self._away = False
        self._ear = threading.Thread(target=self._listen, name="ear", daemon=True)
        self._mouth = threading.Thread(target=self._speak, name="mouth", daemon=True)

    def start(self) -> None:
        self._ear.start()

    def join(self, timeout_s: float) -> None:
        """After the end: lets a call that is about to be answered come to its own end."""
        until = time.monotonic() + timeout_s
        for thread in (self._ear, self._mouth):
            if thread.is_alive():
                thread.join(max(0, until - time.monotonic()))

    def soon(self, *, hurry: bool = True) -> None:
        """Report now; without hurry, at most once a second."""
        due = 0.0 if hurry else self._spoke_at + 1
        with self._something_to_say:
            self._due = due if self._due is None else min(due, self._due)
            self._something_to_say.notify()

    def hush(self) -> None:
        """Let the mouth see that it has ended."""
        with self._something_to_say:
            self._something_to_say.notify()

    def _listen(self) -> None:
        backoff = Backoff()
        while not self._ended.is_set() and not self._open_session():
            self._ended.wait(backoff.pause_s())
        backoff.reset()
        self._mouth.start()
        wait_s = 0.0
        while not self._ended.is_set():
            if self._call_and_rest(wait_s):
                backoff.reset()
                wait_s = self._interval_s * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
            else:
                wait_s = 0.0
                self._ended.wait(backoff.pause_s())

    def _call_and_rest(self, wait_s: float) -> bool:
        """A server that has nothing new and does not wait either is not asked again at once."""
        began = time.monotonic()
        news = self._call(wait_s)
        if news:
            self._ended.wait(NEWS_PAUSE_S)
        elif news is False and time.monotonic() - began < wait_s / 2:
            self._ended.wait(NO_NEWS_PAUSE_S)
        return news is not None

    def _speak(self) -> None:
        backoff = Backoff()
        while self._wait_until_due():
            if self._call(0, brief=True) is None:
                self._ended.wait(backoff.pause_s())
                self.soon()
            else:
                backoff.reset()

    def _wait_until_due(self) -> bool:
        """Whether there is something to say; False at the end."""
        with self._something_to_say:
            while not self._ended.is_set():
                left_s = None if self._due is None else self._due - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._due, self._spoke_at = None, time.monotonic()
                    return True
                self._something_to_say.wait(left_s)
        return False

    def _open_session(self) -> bool:
        try:
            answer = self._control_plane.open_session()
        except ControlPlaneError as error:
            self._failed(error)
            return False
        self._answered()
        return self._opened(answer)

    def _call(self, wait_s: float, *, brief: bool = False) -> bool | None:
        """One report and its answer: whether it was news, or None if it failed or is not to be obeyed."""
        report = self._make(min(wait_s, LONGEST_WAIT_S), brief)
        try:
            answer = self._control_plane.sync(report.request)
        except ControlPlaneError as error:
            self._failed(error)
            return None
        if self._ended.is_set():
            return None
        self._answered()
        self._interval_s = answer.report_interval_s
        if answer.renew_credential:
            self._renewed()
        if self._take(report, answer) is AnswerOutcome.REFUSED:
            return None
        return answer.generation != report.request.generation or bool(answer.streams)

    def _renewed(self) -> None:
        try:
            self._renew()
        except ControlPlaneError as error:
            log.warning("no new credential (%s); asked for again with the next report", error)

    def _failed(self, error: ControlPlaneError) -> None:
        if self._ended.is_set():
            return
        if isinstance(error, SessionTaken):
            log.critical(
                "another agent with this node's identity has taken over; containers are left as they are"
            )
            self._end(EXIT_SESSION_TAKEN)
        elif isinstance(error, CredentialRejected):
            log.critical(
                "the control plane does not know this node's credential; join it anew with a new token"
            )
            self._end(EXIT_UNAUTHORIZED)
        elif not self._away:
            self._away = True
            why = "is away" if isinstance(error, Unreachable) else "refuses this node's reports"
            log.warning("the control plane %s (%s); containers go on, and it is tried again", why, error)

    def _answered(self) -> None:
        if self._away:
            self._away = False
            log.info("the control plane answers again")
