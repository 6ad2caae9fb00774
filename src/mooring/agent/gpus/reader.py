"""Reads the node's GPUs: the interface `GpuReader`, and the reader that uses NVML.

    reader's thread ──JSON line──> child (nvml/process.py) ──> libnvidia-ml ──> driver
         │  no answer within `answer_within_s`: SIGKILL, report nvml_hung, a new child after a pause
         └──> GpuReading (frozen), which `latest()` returns without waiting

Each child initialises NVML once. A new child is needed after a driver upgrade, because the old one keeps the
old library mapped, and to find a lost GPU again. A GPU that the driver no longer lists is reported as lost.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

from mooring.agent.gpus.event_ledger import EventLedger
from mooring.agent.nvml.child import ChildEndedError, ChildHungError, NvmlChild
from mooring.agent.nvml.types import (
    GpuEvent,
    NodeFault,
    NvmlGpuFacts,
    NvmlInventory,
    NvmlSample,
    NvmlSampleAnswer,
    UnreadableGpu,
)
from mooring.core.backoff import Backoff

NOT_READ_YET: Final[NodeFault] = {"code": "not_read_yet", "message": "The GPUs have not been read yet"}
EVENTS_LOST: Final[NodeFault] = {"code": "events_lost", "message": "NVML no longer delivers GPU events"}
UNKILLABLE_MAX: Final = 3  # while so many children survive SIGKILL, no new one is started
NEED_NEW_CHILD: Final = frozenset({"gpu_lost", "reset_required"})  # which may see that the GPU is back


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Everything known about the node's GPUs at one time.

    `inventory` is None while nothing is known, and the last known one while there is an `error`.
    `samples` are the newest, and empty while there is an `error`. `events` are counted from the reader's
    start, so that a slow consumer misses none. `taken_at` is `time.monotonic()` when this object was made.
    """

    taken_at: float
    inventory: tuple[NvmlGpuFacts, ...] | None = None
    samples: tuple[NvmlSample, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    unreadable: tuple[UnreadableGpu, ...] = ()
    events: tuple[GpuEvent, ...] = ()
    error: NodeFault | None = None
    simulated: bool = False


class GpuReader(Protocol):
    def latest(self) -> GpuReading:
        """The newest reading, without waiting."""

    def wait_first(self, timeout_s: float) -> bool:
        """Wait for the first reading, even a failed one. Returns whether it is there in time."""

    def fresh(self, timeout_s: float) -> GpuReading | None:
        """A reading whose samples, and the faults they show, are newer than this call; None: not in time."""

    def on_news(self, callback: Callable[[], None]) -> None:
        """Set what the reader's thread calls when a GPU's health may have changed; it must not block."""

    def close(self) -> None:
        """Free all resources; `latest()` keeps its last value."""


class NodeUnreadableError(Exception):
    """NVML answered with an error for the whole node, or delivers no more events."""

    def __init__(self, fault: NodeFault) -> None:
        super().__init__(fault["message"])
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and limits in seconds. Pauses before a new child are given as the first and the longest."""

    sample_interval_s: float = 1
    inventory_interval_s: float = 15
    inventory_gap_s: float = 2  # after events, which programs can cause at any rate
    answer_within_s: float = 10
    first_answer_within_s: float = 60  # without persistence mode, starting NVML initialises every GPU
    retry_pauses_s: tuple[float, float] = (1, 60)
    lost_pauses_s: tuple[float, float] = (15, 300)  # while a GPU is lost, unreadable or needs a reset
    absent_pauses_s: tuple[float, float] = (60, 300)  # while there is no NVML library: a CPU node


class NvmlGpuReader:
    """Reads the GPUs through a child process. Creating the reader starts its thread.

    Args:
        environment: the child's whole environment; None: the agent's.
    """

    def __init__(self, pace: Pace | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._pace = pace or Pace()
        self._environment = environment
        self._reading = GpuReading(time.monotonic(), error=NOT_READ_YET)
        self._ledger = EventLedger()
        self._faulty: frozenset[str] = frozenset()  # the GPUs with a fault in the last sample
        self._awaited = False  # `fresh` waits for the current sample
        self._report_news: Callable[[], None] = lambda: None
        self._child: NvmlChild | None = None
        self._unkillable: list[NvmlChild] = []
        self._renew_at = math.inf  # when a new child replaces the present one
        self._retry_backoff = Backoff(*self._pace.retry_pauses_s)
        self._lost_backoff = Backoff(*self._pace.lost_pauses_s)
        self._absent_backoff = Backoff(*self._pace.absent_pauses_s)
        self._first, self._closing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._sampled = threading.Condition()
        self._sampled_at = -math.inf  # when the newest samples were requested
        self._thread = threading.Thread(target=self._run, name="gpu-reader", daemon=True)
        self._thread.start()

    def latest(self) -> GpuReading:
        return self._reading

    def wait_first(self, timeout_s: float) -> bool:
        return self._first.wait(timeout_s)

    def on_news(self, callback: Callable[[], None]) -> None:
        self._report_news = callback

    def close(self) -> None:
        """Takes at most 2 s. A child that SIGKILL does not end is left behind."""
        self._closing.set()
        self._wake.set()
        if self._child is not None:
            self._child.kill()
        self._thread.join(timeout=2)

    def fresh(self, timeout_s: float) -> GpuReading | None:
        called_at = time.monotonic()
        with self._sampled:
            self._wake.set()
            in_time = self._sampled.wait_for(lambda: self._sampled_at >= called_at, timeout_s)
        return self._reading if in_time else None

    @property
    def child_pid(self) -> int | None:
        """The pid of the child, if there is one."""
        child = self._child
        return child.pid if child else None

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._run_child())

    def _run_child(self) -> float:
        """Run one child to its end. Returns the pause before the next, in seconds."""
        try:
            self._serve()
        except ChildHungError as hung:
            return self._failed({"code": "nvml_hung", "message": str(hung)})
        except (ChildEndedError, OSError) as ended:
            return self._failed({"code": "nvml_ended", "message": str(ended)})
        except NodeUnreadableError as unreadable:
            return self._node_unreadable(unreadable.fault)
        else:
            return 0
        finally:
            self._end_child()

    def _serve(self) -> None:
        """Query one child until it fails, or until a new one may find lost GPUs again."""
        self._child = child = self._new_child()
        self._renew_at = math.inf
        self._read_inventory(child, self._pace.first_answer_within_s)
        sample_at = time.monotonic()
        inventory = _InventoryTimes(self._pace, sample_at)
        while self._wait_until(sample_at) and time.monotonic() < self._renew_at:
            began_at = time.monotonic()
            sample_at = max(sample_at + self._pace.sample_interval_s, began_at)
            events = self._read_sample(child)
            now = time.monotonic()
            if self._has_new_fault() or inventory.is_due(now, events=events, awaited=self._awaited):
                self._read_inventory(child, self._pace.answer_within_s)
                inventory.was_read(time.monotonic())
            with self._sampled:
                self._sampled_at = began_at
                self._sampled.notify_all()

    def _wait_until(self, at: float) -> bool:
        """Wait until `at` (monotonic), or until `fresh()` or `close()` is called. False: closed."""
        self._awaited = self._wake.wait(max(0, at - time.monotonic()))
        self._wake.clear()
        return not self._closing.is_set()

    def _new_child(self) -> NvmlChild:
        self._unkillable = [child for child in self._unkillable if not child.reaped()]
        if len(self._unkillable) >= UNKILLABLE_MAX:
            raise ChildHungError(
                f"{len(self._unkillable)} NVML processes hang in the driver and survive SIGKILL"
            )
        return NvmlChild(self._environment)

    def _read_inventory(self, child: NvmlChild, timeout_s: float) -> None:
        answer = cast(NvmlInventory, self._ask(child, "inventory", timeout_s))
        gpus = _with_missing(self._reading.inventory or (), answer)
        before = _faults_of(self._reading.inventory or ())
        self._plan_renewal(bool(answer["unreadable"]) or any(gpu["fault"] in NEED_NEW_CHILD for gpu in gpus))
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
        if _faults_of(gpus) != before:
            self._report_news()

    def _plan_renewal(self, is_needed: bool) -> None:
        """A lost GPU may be back after a reset; only a new child sees it."""
        if not is_needed:
            self._renew_at = math.inf
            self._lost_backoff.reset()
        elif self._renew_at == math.inf:
            self._renew_at = time.monotonic() + self._lost_backoff.pause_s()

    def _read_sample(self, child: NvmlChild) -> bool:
        """Read a sample of every GPU. Returns whether there were events."""
        answer = cast(NvmlSampleAnswer, self._ask(child, "sample", self._pace.answer_within_s))
        is_news = self._ledger.add(answer["events"], time.monotonic())
        self._retry_backoff.reset()
        self._absent_backoff.reset()
        events = self._ledger.events()
        self._publish(replace(self._reading, samples=tuple(answer["samples"]), events=events, error=None))
        if is_news:
            self._report_news()
        if answer["deaf"]:
            raise NodeUnreadableError(EVENTS_LOST)
        self._faulty = frozenset(answer["faults"])
        return bool(answer["events"])

    def _has_new_fault(self) -> bool:
        """Whether the last sample shows a fault of a GPU that is healthy in the inventory."""
        return any(
            gpu["fault"] is None and gpu["uuid"] in self._faulty for gpu in self._reading.inventory or ()
        )

    def _ask(self, child: NvmlChild, operation: str, timeout_s: float) -> dict[str, Any]:
        answer = child.ask({"op": operation}, timeout_s)
        if answer["error"] is not None:
            raise NodeUnreadableError(answer["error"])
        return cast(dict[str, Any], answer["answer"])

    def _node_unreadable(self, fault: NodeFault) -> float:
        """As `_failed`, but a node without the NVML library that never had a GPU is a CPU node: no error."""
        if fault["code"] == "library_not_found" and not self._reading.inventory:
            self._publish(replace(self._reading, inventory=(), error=None))
            return self._absent_backoff.pause_s()
        return self._failed(fault)

    def _failed(self, fault: NodeFault) -> float:
        """Publish the fault. Returns the pause before the next child, in seconds."""
        if not self._closing.is_set():
            self._publish(replace(self._reading, samples=(), error=fault))
        return self._retry_backoff.pause_s()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            if not child.reaped():
                self._unkillable.append(child)

    def _publish(self, reading: GpuReading) -> None:
        self._reading = replace(reading, taken_at=time.monotonic())
        self._first.set()


class _InventoryTimes:
    """Schedules inventory readings: at intervals, after events, and once more after that.

    A driver that has just reported an error may set its recovery action a little later.
    """

    def __init__(self, pace: Pace, read_at: float) -> None:
        self._pace, self._read_at = pace, read_at
        self._events = self._again = False

    def is_due(self, now: float, *, events: bool, awaited: bool) -> bool:
        """`awaited`: a caller of `fresh` must see the effect of events, before a GPU is released."""
        self._events = self._events or events
        if self._events and awaited:
            return True
        soon = self._events or self._again
        wait_s = self._pace.inventory_gap_s if soon else self._pace.inventory_interval_s
        return now >= self._read_at + min(wait_s, self._pace.inventory_interval_s)

    def was_read(self, now: float) -> None:
        self._read_at = now
        self._again, self._events = self._events, False


def _faults_of(gpus: Iterable[NvmlGpuFacts]) -> dict[str, str]:
    return {gpu["uuid"]: gpu["fault"] for gpu in gpus if gpu["fault"]}


def _with_missing(before: Iterable[NvmlGpuFacts], now: NvmlInventory) -> tuple[NvmlGpuFacts, ...]:
    """The GPUs that the driver lists, and, with a fault, those that it listed before."""
    present = {gpu["uuid"] for gpu in now["gpus"]}
    codes = {gpu["uuid"]: gpu["code"] for gpu in now["unreadable"]}
    missing = [
        {**gpu, "fault": codes.get(gpu["uuid"], "gpu_lost")} for gpu in before if gpu["uuid"] not in present
    ]
    return (*now["gpus"], *cast(list[NvmlGpuFacts], missing))
