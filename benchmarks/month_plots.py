"""Plots of the simulated month as SVG; equal figures give equal bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.month_simulation import Interval, Outcome
from benchmarks.month_workload import DAY_S, MONTH_S, PROJECTS
from benchmarks.plots import plot

_BINS = 120


def write(folder: Path, lines: Sequence[str], outcomes: Mapping[str, Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plot(folder / "waits.svg", lambda axes: _waits(axes, outcomes))
    plot(folder / "worst-waits.svg", lambda axes: _worst_by_size(axes, outcomes))
    plot(folder / "projects.svg", lambda axes: _by_project(axes, outcomes))
    plot(folder / "utilization.svg", lambda axes: _use(axes, outcomes))
    (folder / "table.md").write_text("\n".join(lines) + "\n")


def _waits(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        waits = sorted(started.waited_s / 3600 for started in outcome.started)
        positions = range(0, len(waits), max(1, len(waits) // 500))
        axes.plot([waits[at] for at in positions], [100 * at / len(waits) for at in positions], label=name)
    axes.set(xlabel="hours waited", ylabel="% of tasks that waited less")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.legend()


def _worst_by_size(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    sizes = sorted({started.job.task.gpus for outcome in outcomes.values() for started in outcome.started})
    width = 0.8 / len(outcomes)
    for place, (name, outcome) in enumerate(outcomes.items()):
        worst = [
            max((each.waited_s / 3600 for each in outcome.started if each.job.task.gpus == size), default=0.0)
            for size in sizes
        ]
        axes.bar([at + place * width for at in range(len(sizes))], worst, width, label=name)
    axes.set(xlabel="GPUs asked for", ylabel="longest wait, hours")
    axes.set_xticks([at + 0.4 for at in range(len(sizes))], [str(size) for size in sizes])
    axes.legend()


def _by_project(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    names = [f"project-{rank}" for rank in range(1, PROJECTS + 1)]
    width = 0.8 / len(outcomes)
    for place, (policy, outcome) in enumerate(outcomes.items()):
        waits = {name: [s.waited_s for s in outcome.started if s.job.project == name] for name in names}
        means = [sum(waits[name]) / max(1, len(waits[name])) / 3600 for name in names]
        axes.bar([at + place * width for at in range(len(names))], means, width, label=policy)
    axes.set(xlabel="projects, those with the most tasks first", ylabel="mean wait, hours")
    axes.set_xticks([at + 0.4 for at in range(len(names))], [str(rank) for rank in range(1, PROJECTS + 1)])
    axes.legend()


def _use(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        days = [(place + 0.5) * MONTH_S / _BINS / DAY_S for place in range(_BINS)]
        axes.plot(days, [100 * used / outcome.gpus for used in _binned(outcome.intervals)], label=name)
    axes.set(xlabel="day", ylabel="% of the GPUs in use", ylim=(0, 102))
    axes.legend()


def _binned(intervals: Sequence[Interval]) -> list[float]:
    """The mean number of GPUs in use in each of the equal parts of the month."""
    size, means, at = MONTH_S / _BINS, [0.0] * _BINS, 0.0
    for interval in intervals:
        ends, in_use = at + interval.seconds, sum(interval.held.values()) / 1000
        for place in range(int(at // size), min(int(ends // size) + 1, _BINS)):
            overlap = min(ends, (place + 1) * size) - max(at, place * size)
            means[place] += in_use * max(0.0, overlap) / size
        at = ends
    return means
