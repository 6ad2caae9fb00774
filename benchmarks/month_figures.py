"""Figures of a simulated month: waiting times, use of the GPUs, and fairness."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from benchmarks.figures import percentile
from benchmarks.month_simulation import Interval, Outcome
from benchmarks.month_workload import DAY_S, MONTH_S


@dataclass(frozen=True, slots=True)
class Figures:
    mean_wait_s: float
    median_wait_s: float
    p99_wait_s: float
    worst_wait_s: float
    worst_large_wait_s: float  # of the tasks that request the most GPUs
    longest_as_oldest_s: float
    used: float  # fraction of the GPU time of the month
    wasted: float  # fraction that was free although waiting tasks wanted it
    jain_days: float
    jain_month: float
    never: int


def figures(outcome: Outcome) -> Figures:
    waits = [started.waited_s for started in outcome.started]
    largest = max(started.job.task.gpus for started in outcome.started)
    month = list(until(outcome.intervals, MONTH_S))
    seconds = sum(interval.seconds for interval in month)
    used = sum(interval.seconds * _used_gpus(interval) for interval in month)
    wasted = sum(interval.seconds * _wasted_gpus(interval, outcome.gpus) for interval in month)
    return Figures(
        mean_wait_s=sum(waits) / len(waits),
        median_wait_s=percentile(waits, 0.5),
        p99_wait_s=percentile(waits, 0.99),
        worst_wait_s=max(waits),
        worst_large_wait_s=max(each.waited_s for each in outcome.started if each.job.task.gpus == largest),
        longest_as_oldest_s=longest_as_oldest(outcome),
        used=used / (outcome.gpus * seconds),
        wasted=wasted / (outcome.gpus * seconds),
        jain_days=jain_over_time(outcome.intervals, outcome.gpus, DAY_S),
        jain_month=jain_over_time(month, outcome.gpus, inf),
        never=len(outcome.never),
    )


def until(intervals: Sequence[Interval], end: float) -> Iterator[Interval]:
    """The intervals up to `end`. What runs after the last arrival says nothing about a policy."""
    left = end
    for interval in intervals:
        if left <= 0:
            return
        yield Interval(min(interval.seconds, left), interval.held, interval.wanted)
        left -= interval.seconds


def _used_gpus(interval: Interval) -> float:
    return sum(interval.held.values()) / 1000


def _wasted_gpus(interval: Interval, gpus: int) -> float:
    """The free GPUs that waiting tasks could use if each task could be split arbitrarily."""
    return min(float(gpus), sum(interval.wanted.values()) / 1000) - _used_gpus(interval)


def longest_as_oldest(outcome: Outcome) -> float:
    """The longest time in seconds for which one task was the oldest waiting task.

    If this has a bound, no task starves: every waiting task is the oldest at some time.
    """
    started = {each.job.name: each.at for each in outcome.started}
    jobs = sorted((each.job for each in outcome.started), key=lambda job: (job.arrives_at, job.name))
    longest, older_gone_at = 0.0, 0.0
    for job in jobs:
        longest = max(longest, started[job.name] - max(job.arrives_at, older_gone_at))
        older_gone_at = max(older_gone_at, started[job.name])
    return longest


# ---- fairness


def jain_over_time(intervals: Sequence[Interval], gpus: int, window_s: float) -> float:
    """Jain's index of the GPU time that projects used, relative to their fair share.

    The index is (sum x)^2 / (n * sum x^2) over projects (Jain, Chiu, Hawe 1984). Here x is the GPU time that
    a project used, divided by its max-min fair share of what all projects wanted (used or waited for). Both
    are summed over a window, but only while some task waited for GPUs. 1 is perfectly fair; at 1/n, one
    project has everything. Returns the mean over windows, weighted by the time in which tasks waited.
    """
    windows: dict[int, _Window] = {}
    at = 0.0
    for interval in intervals:
        number, at = int(at // window_s), at + interval.seconds
        if sum(interval.wanted.values()) > sum(interval.held.values()):
            windows.setdefault(number, _Window()).add(interval, gpus)
    contended = sum(window.seconds for window in windows.values())
    indices = (jain(window.used, window.due) * window.seconds for window in windows.values())
    return sum(indices) / contended if contended else 1.0


@dataclass(slots=True)
class _Window:
    """The time in which tasks waited for GPUs, and in it what projects used and what they were due.

    In thousandths of a GPU times seconds.
    """

    seconds: float = 0.0
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    due: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, interval: Interval, gpus: int) -> None:
        self.seconds += interval.seconds
        for project, part in max_min(interval.wanted, 1000 * gpus).items():
            self.due[project] += part * interval.seconds
            self.used[project] += interval.held.get(project, 0) * interval.seconds


def jain(used: Mapping[str, float], due: Mapping[str, float]) -> float:
    fractions = [used[project] / amount for project, amount in due.items() if amount > 0]
    squares = sum(fraction * fraction for fraction in fractions)
    return sum(fractions) ** 2 / (len(fractions) * squares) if squares else 1.0


def max_min(wanted: Mapping[str, float], gpus: float) -> dict[str, float]:
    """Max-min fair parts: equal, but no more than wanted; the others share what is left."""
    parts: dict[str, float] = {}
    left, waiting = float(gpus), sorted(wanted.items(), key=lambda item: (item[1], item[0]))
    for place, (project, amount) in enumerate(waiting):
        parts[project] = min(amount, left / (len(waiting) - place))
        left -= parts[project]
    return parts
