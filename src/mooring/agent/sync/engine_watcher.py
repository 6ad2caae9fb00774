"""Lists the engine's containers: every 15 s, and soon after each event of the engine."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from mooring.agent.gpus.telemetry import unknown_engine
from mooring.agent.runtime import Container, Runtime, RuntimeFacts, RuntimeUnavailable
from mooring.agent.sync.tasks import Signal
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import Reason

RESYNC_S: Final = 15.0
RETRY_S: Final = 1.0  # after a listing or an event stream that failed
LISTING_GAP_S: Final = 0.01  # after each, so that a burst of events leads to one listing
ENGINE_UNAVAILABLE: Final = Reason(
    code="docker_unavailable", message="The container engine does not answer on this node"
)

log = logging.getLogger(__name__)


class EngineWatcher:
    """Makes the listings that `Agent.serve` calls for.

    Args:
        begin_listing: called before the engine is asked; returns a number for `on_listing`.
        on_listing: applies a listing; returns whether another is needed.
        on_unavailable: receives the problem when the engine does not answer, so its containers are unknown.
        on_facts: receives the facts about the engine when they have changed.
        first_listing_done: is set after the first listing, even if the engine did not answer.
        wake: makes `Agent.serve` check whether a listing is due.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        begin_listing: Callable[[], int],
        on_listing: Callable[[int, list[Container], list[Orphan]], bool],
        on_unavailable: Callable[[Reason], None],
        on_facts: Callable[[RuntimeFacts], None],
        first_listing_done: Signal,
        wake: Callable[[], None],
    ) -> None:
        self._first_listing_done = first_listing_done
        self.facts: RuntimeFacts | None = None
        self._runtime, self._begin_listing = runtime, begin_listing
        self._on_listing, self._on_unavailable, self._on_facts = on_listing, on_unavailable, on_facts
        self._wake = wake
        self._answers = False
        self._facts_at = 0.0
        self._wanted = True
        self._next_at = 0.0

    def request_listing(self) -> None:
        self._wanted = True
        self._wake()

    def due_in_s(self) -> float:
        return 0 if self._wanted else max(0, self._next_at - time.monotonic())

    def list_containers(self) -> None:
        """Make one listing. Read the engine's facts if they are old, or if the engine answers again."""
        self._wanted = False
        answered_before = self._answers
        self._answers = self._list()
        facts_are_old = time.monotonic() - self._facts_at >= RESYNC_S
        if self._answers and (facts_are_old or not answered_before):
            self._read_facts()
        self._first_listing_done.set()
        self._next_at = time.monotonic() + (RESYNC_S if self._answers else RETRY_S)

    def _list(self) -> bool:
        number = self._begin_listing()
        try:
            containers, foreign_containers = self._runtime.containers()
        except Exception as error:
            self._failed(error)
            return False
        # Not `|=`: that reads the flag first, and would undo a request that comes meanwhile.
        if self._on_listing(number, containers, foreign_containers):
            self._wanted = True
        return True

    def _failed(self, error: Exception) -> None:
        if self._answers or self.facts is None:
            expected = isinstance(error, RuntimeUnavailable)
            log.error("the container engine does not answer: %s", error, exc_info=None if expected else error)
        self.facts = replace(self.facts or unknown_engine(), problem=ENGINE_UNAVAILABLE)
        self._on_unavailable(ENGINE_UNAVAILABLE)

    def _read_facts(self) -> None:
        try:
            facts = self._runtime.facts()
        except Exception as error:
            if not isinstance(error, RuntimeUnavailable):
                log.exception("cannot read the facts of the container engine")
            facts = replace(self.facts or unknown_engine(), problem=ENGINE_UNAVAILABLE)
        self._facts_at = time.monotonic()
        before, self.facts = self.facts, facts
        if facts != before:
            self._on_facts(facts)
