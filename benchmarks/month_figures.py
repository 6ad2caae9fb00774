"""What a simulated month says of a policy: waiting, use of the GPUs, and how fairly they were shared out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import percentile
from benchmarks.month_simulation import Interval, Outcome
from benchmarks.month_workload import DAY_S, MONTH_S


@dataclass(frozen=True, slots=True)
class Figures:
    mean_wait_s: float
    p99_wait_s: float
    worst_wait_s: float
    worst_large_wait_s: float  # of the tasks that ask for the most GPUs
    utilization: float  # of the GPUs, from the first arrival to the last
    jain: float
    never: int


def figures(outcome: Outcome, gpus: int) -> Figures:
    waits = [started.waited_s for started in outcome.started]
    most = max(started.task.gpus for started in outcome.started)
    return Figures(
        mean_wait_s=sum(waits) / len(waits),
        p99_wait_s=percentile(waits, 0.99),
        worst_wait_s=max(waits),
        worst_large_wait_s=max(each.waited_s for each in outcome.started if each.task.gpus == most),
        utilization=_utilization(outcome.intervals, gpus),
        jain=jain_over_time(outcome.intervals, gpus),
        never=outcome.never,
    )


def _utilization(intervals: Sequence[Interval], gpus: int) -> float:
    """While there are arrivals: what is left to run after the month says nothing of a policy."""
    held, left = 0.0, float(MONTH_S)
    for interval in intervals:
        seconds = min(interval.seconds, left)
        held += seconds * sum(interval.held.values())
        left -= seconds
    return held / (gpus * (MONTH_S - left))


def jain_over_time(intervals: Sequence[Interval], gpus: int, window_s: float = DAY_S) -> float:
    """Jain's index (Jain, Chiu, Hawe 1984) of what projects had, relative to what was due to them.

    Due is the max-min fair part of the GPUs, given what each wanted at each moment; both are summed over a
    day, since nobody is owed a part of every minute, and only while some project wanted more than it had. The
    mean of the days, by how long there was such a time in each.
    """
    had: dict[int, dict[str, float]] = {}
    due: dict[int, dict[str, float]] = {}
    contended: dict[int, float] = {}
    at = 0.0
    for interval in intervals:
        day, at = int(at // window_s), at + interval.seconds
        if sum(interval.wanted.values()) <= sum(interval.held.values()):
            continue
        contended[day] = contended.get(day, 0.0) + interval.seconds
        for project, part in max_min(interval.wanted, gpus).items():
            days_due, days_had = due.setdefault(day, {}), had.setdefault(day, {})
            days_due[project] = days_due.get(project, 0.0) + part * interval.seconds
            given = interval.held.get(project, 0.0)
            days_had[project] = days_had.get(project, 0.0) + given * interval.seconds
    total = sum(contended.values())
    if not total:
        return 1.0
    return sum(_jain(had[day], due[day]) * seconds for day, seconds in contended.items()) / total


def _jain(had: Mapping[str, float], due: Mapping[str, float]) -> float:
    parts = [had[project] / owed for project, owed in due.items() if owed > 0]
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0


def max_min(wanted: Mapping[str, float], gpus: float) -> dict[str, float]:
    """Equal parts, except that nobody is given more than they want; what they leave goes to the others."""
    parts: dict[str, float] = {}
    left, waiting = float(gpus), sorted(wanted.items(), key=lambda item: (item[1], item[0]))
    for place, (project, amount) in enumerate(waiting):
        parts[project] = min(amount, left / (len(waiting) - place))
        left -= parts[project]
    return parts
