"""What the agent knows of its cards: the reader's interface, and the one that asks NVML.

    reader's thread ──JSON line──> child (nvml_process) ──> libnvidia-ml ──> driver
         │  no answer in `watchdog_s`: SIGKILL, report nvml_hung, a new child after a pause
         └──> GpuReading (frozen), which `latest()` hands to the heartbeat without waiting

One child is one life of NVML: driver gone, upgraded or cards lost means a new child, because the old
one keeps the old library mapped. A card once seen is listed as lost when the driver no longer does.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Final, Protocol, cast

from mooring.agent.gpus.event_ledger import EventLedger
from mooring.agent.nvml.child import ChildEndedError, ChildHungError, NvmlChild
from mooring.agent.nvml.types import (
    GpuEvent,
    GpuFacts,
    NodeFault,
    NvmlInventory,
    Sample,
    SampleAnswer,
    UnreadableGpu,
)

NOT_READ_YET: Final[NodeFault] = {"code": "not_read_yet", "message": "The GPUs have not been read yet"}
EVENTS_LOST: Final[NodeFault] = {"code": "events_lost", "message": "NVML no longer delivers GPU events"}
UNKILLABLE_MAX: Final = 3
CURED_ANEW: Final = frozenset({"gpu_lost", "reset_required"})


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Everything known of the node's cards at one moment.

    `inventory` is None while nothing is known, and the last one known while there is an `error`;
    `samples` are of the last second, and none while there is an `error`. `events` are counted since the
    reader was made, so a consumer that looks seldom misses none.
    `taken_at` is `time.monotonic()` of the last answer.
    """

    taken_at: float
    inventory: tuple[GpuFacts, ...] | None = None
    samples: tuple[Sample, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    unreadable: tuple[UnreadableGpu, ...] = ()
    events: tuple[GpuEvent, ...] = ()
    error: NodeFault | None = None
    simulated: bool = False


class GpuReader(Protocol):
    def latest(self) -> GpuReading:
        """The newest reading, at once."""

    def wait_first(self, timeout_s: float) -> bool:
        """Whether the first reading is there, a failed one included, after at most this long."""

    def fresh(self, timeout_s: float) -> GpuReading | None:
        """A reading whose samples, and faults that they show, are of after this call; None: not in time."""

    def on_news(self, call: Callable[[], None]) -> None:
        """Call this, from the reader's thread, when a card's health may have changed. It must not block."""

    def close(self) -> None:
        """Lets go of everything; `latest()` stays what it was."""


class NodeUnreadableError(Exception):
    """NVML's answer for the whole node was an error."""

    def __init__(self, fault: NodeFault) -> None:
        super().__init__(fault["message"])
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what is asked, in seconds. The pauses are before each new child, the last one repeats."""

    sample_interval_s: float = 1
    inventory_interval_s: float = 15
    # After an event the inventory is read at once, but not more often than this: programs can cause events
    # as fast as they like.
    inventory_gap_s: float = 2
    watchdog_s: float = 10
    start_watchdog_s: float = 60  # without persistence mode, starting NVML wakes up every card
    retry_pauses_s: tuple[float, ...] = (1, 2, 4, 8, 16, 30, 60)
    lost_pauses_s: tuple[float, ...] = (15, 30, 60, 120, 300)  # while a card is lost
    absent_pauses_s: tuple[float, ...] = (60, 300)  # while there is no NVML library: a CPU node


class NvmlGpuReader:
    """Reads the cards through a child process; starts reading when it is made.

    `environment` is the child's whole environment, the agent's own when None.
    """

    def __init__(self, pace: Pace | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._pace = pace or Pace()
        self._environment = environment
        self._reading = GpuReading(time.monotonic(), error=NOT_READ_YET)
        self._ledger = EventLedger()
        self._faults: frozenset[str] = frozenset()  # the cards at fault in the last sample
        self._awaited = False  # somebody asked for the last sample
        self._news: Callable[[], None] = lambda: None
        self._child: NvmlChild | None = None
        self._unkillable: list[NvmlChild] = []
        self._renew_at = math.inf
        self._retry_pauses = _pauses(self._pace.retry_pauses_s)
        self._lost_pauses = _pauses(self._pace.lost_pauses_s)
        self._absent_pauses = _pauses(self._pace.absent_pauses_s)
        self._first, self._closing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._sampled = threading.Condition()
        self._sampled_at = -math.inf  # when the newest samples were asked for
        self._thread = threading.Thread(target=self._run, name="gpu-reader", daemon=True)
        self._thread.start()

    def latest(self) -> GpuReading:
        return self._reading

    def wait_first(self, timeout_s: float) -> bool:
        return self._first.wait(timeout_s)

    def on_news(self, call: Callable[[], None]) -> None:
        self._news = call

    def close(self) -> None:
        """Takes at most 2 s: a child that even SIGKILL does not end is left to the kernel."""
        self._closing.set()
        self._wake.set()
        if self._child is not None:
            self._child.kill()
        self._thread.join(timeout=2)

    def fresh(self, timeout_s: float) -> GpuReading | None:
        asked_at = time.monotonic()
        with self._sampled:
            self._wake.set()
            in_time = self._sampled.wait_for(lambda: self._sampled_at >= asked_at, timeout_s)
        return self._reading if in_time else None

    @property
    def child_pid(self) -> int | None:
        """The process that holds NVML now, if there is one."""
        child = self._child
        return child.pid if child else None

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._live_once())

    def _live_once(self) -> float:
        """One child from start to end; the pause before the next, in seconds."""
        try:
            self._serve()
        except ChildHungError as hung:
            return self._failed({"code": "nvml_hung", "message": str(hung)})
        except (ChildEndedError, OSError) as ended:
            return self._failed({"code": "nvml_ended", "message": str(ended)})
        except NodeUnreadableError as unreadable:
            return self._unreadable(unreadable.fault)
        else:
            return 0
        finally:
            self._bury()

    def _serve(self) -> None:
        """Asks one child until it fails, or until lost cards make a new one worth a try."""
        self._child = child = self._new_child()
        self._renew_at = math.inf
        self._inventory(child, self._pace.start_watchdog_s)
        sample_at = time.monotonic()
        inventory = _InventoryTimes(self._pace, sample_at)
        while not self._closed_by(sample_at) and time.monotonic() < self._renew_at:
            began_at = time.monotonic()
            sample_at = max(sample_at + self._pace.sample_interval_s, began_at)
            news = self._sample(child)
            if self._is_unwell_anew() or inventory.is_due(time.monotonic(), news=news, awaited=self._awaited):
                self._inventory(child, self._pace.watchdog_s)
                inventory.was_read(time.monotonic())
            with self._sampled:
                self._sampled_at = began_at
                self._sampled.notify_all()

    def _closed_by(self, at: float) -> bool:
        """Waits until then, on the monotonic clock, or until `fresh()` or `close()` is called."""
        self._awaited = self._wake.wait(max(0, at - time.monotonic()))
        self._wake.clear()
        return self._closing.is_set()

    def _new_child(self) -> NvmlChild:
        self._unkillable = [child for child in self._unkillable if not child.reaped()]
        if len(self._unkillable) >= UNKILLABLE_MAX:
            raise ChildHungError(
                f"{len(self._unkillable)} NVML processes hang in the driver and outlive SIGKILL"
            )
        return NvmlChild(self._environment)

    def _inventory(self, child: NvmlChild, timeout_s: float) -> None:
        answer = cast(NvmlInventory, self._ask(child, "inventory", timeout_s))
        gpus = _with_missing(self._reading.inventory or (), answer)
        before = _unwell(self._reading.inventory or ())
        self._plan_renewal(bool(answer["unreadable"]) or any(gpu["fault"] in CURED_ANEW for gpu in gpus))
        self._publish(
            replace(
                self._reading,
                inventory=gpus,
                driver_version=answer["driver_version"],
                cuda_version=answer["cuda_version"],
                unreadable=tuple(answer["unreadable"]),
                error=None,
            )
        )
        if _unwell(gpus) != before:
            self._news()

    def _plan_renewal(self, lost: bool) -> None:
        """A lost card may be back after a reset, and only a new start of NVML shows it."""
        if not lost:
            self._renew_at, self._lost_pauses = math.inf, _pauses(self._pace.lost_pauses_s)
        elif self._renew_at == math.inf:
            self._renew_at = time.monotonic() + next(self._lost_pauses)

    def _sample(self, child: NvmlChild) -> bool:
        """Whether there were events."""
        answer = cast(SampleAnswer, self._ask(child, "sample", self._pace.watchdog_s))
        is_new = self._ledger.add(answer["events"], time.monotonic())
        self._retry_pauses = _pauses(self._pace.retry_pauses_s)
        self._absent_pauses = _pauses(self._pace.absent_pauses_s)
        events = self._ledger.events()
        self._publish(replace(self._reading, samples=tuple(answer["samples"]), events=events, error=None))
        if is_new:
            self._news()
        if answer["deaf"]:
            raise NodeUnreadableError(EVENTS_LOST)
        self._faults = frozenset(answer["faults"])
        return bool(answer["events"])

    def _is_unwell_anew(self) -> bool:
        """Whether the last sample shows a fault of a card that the inventory has as well."""
        return any(
            gpu["fault"] is None and gpu["uuid"] in self._faults for gpu in self._reading.inventory or ()
        )

    def _ask(self, child: NvmlChild, operation: str, timeout_s: float) -> dict[str, Any]:
        answer = child.ask({"op": operation}, timeout_s)
        if answer["error"] is not None:
            raise NodeUnreadableError(answer["error"])
        return cast(dict[str, Any], answer["answer"])

    def _unreadable(self, fault: NodeFault) -> float:
        """No NVML library and never a card: that is a CPU node, and no error."""
        if fault["code"] == "library_not_found" and not self._reading.inventory:
            self._publish(replace(self._reading, inventory=(), error=None))
            return next(self._absent_pauses)
        return self._failed(fault)

    def _failed(self, fault: NodeFault) -> float:
        if not self._closing.is_set():
            self._publish(replace(self._reading, samples=(), error=fault))
        return next(self._retry_pauses)

    def _bury(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            if not child.reaped():
                self._unkillable.append(child)

    def _publish(self, reading: GpuReading) -> None:
        self._reading = replace(reading, taken_at=time.monotonic())
        self._first.set()


class _InventoryTimes:
    """When the inventory is read: regularly, and after news; then once more, as a driver that has just
    announced an error may need a moment to decide what it wants done.
    """

    def __init__(self, pace: Pace, read_at: float) -> None:
        self._pace, self._read_at = pace, read_at
        self._news = self._again = False

    def is_due(self, now: float, *, news: bool, awaited: bool) -> bool:
        """Args: awaited: somebody waits for all that the events of now mean, before a card is given out."""
        self._news = self._news or news
        if self._news and awaited:
            return True
        soon = self._news or self._again
        wait_s = self._pace.inventory_gap_s if soon else self._pace.inventory_interval_s
        return now >= self._read_at + min(wait_s, self._pace.inventory_interval_s)

    def was_read(self, now: float) -> None:
        self._read_at = now
        self._again, self._news = self._news, False


def _unwell(gpus: Iterable[GpuFacts]) -> dict[str, str]:
    return {gpu["uuid"]: gpu["fault"] for gpu in gpus if gpu["fault"]}


def _with_missing(before: Iterable[GpuFacts], now: NvmlInventory) -> tuple[GpuFacts, ...]:
    """The cards of now, and those that were there before and cannot be read now, as faulty."""
    present = {gpu["uuid"] for gpu in now["gpus"]}
    why = {gpu["uuid"]: gpu["code"] for gpu in now["unreadable"]}
    missing = [
        {**gpu, "fault": why.get(gpu["uuid"], "gpu_lost")} for gpu in before if gpu["uuid"] not in present
    ]
    return (*now["gpus"], *cast(list[GpuFacts], missing))


def _pauses(pauses_s: tuple[float, ...]) -> Iterator[float]:
    return chain(pauses_s, repeat(pauses_s[-1]))
