"""How full a cluster gets: the tasks of a trace, placed one by one by the scheduler or another policy.

    python -m benchmarks.packing --nodes FILE --pods FILE --arrive 1.3 --seeds 42..51 --placements OUT.csv

A task that fits is placed; a task that fits nowhere is dropped; no task ends. The score at x % is the mean
fraction of GPUs that are allocated, over the offers at which the GPUs requested so far round to x % of all.
The exit status is 1 if a placement breaks a rule.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import trace
from benchmarks.packing_checks import Placed, broken_rules
from benchmarks.packing_peers import peer
from benchmarks.trace import Machine, Task
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.shapes import FleetNode, NodeClass, Shape, tie_of

POINTS = (100, 110, 120, 130)
POLICIES = ("mooring", "fgd", "best-fit", "random")
MAX_SHOWN = 10  # broken rules printed


@dataclass(frozen=True)
class Run:
    """The offers of one seed and their placements."""

    seed: int
    offered: list[Task]
    placed: list[Placed]
    seconds: list[float]  # per decision
    wrong: list[str]

    def at(self, capacity: int) -> dict[int, float]:
        """The score in percent at each point reached."""
        requested = np.cumsum([task.milli for task in self.offered])
        allocated = np.cumsum(
            [
                task.milli if placement.node else 0
                for task, placement in zip(self.offered, self.placed, strict=True)
            ]
        )
        arrival = np.floor(100 * requested / capacity + 0.5)
        return {
            point: float(allocated[arrival == point].mean() / capacity * 100)
            for point in POINTS
            if (arrival == point).any()
        }


Place = Callable[[Task], Placed]


def mooring(machines: Sequence[Machine], seed: int) -> Place:
    """The fleet of the scheduler, which learns the mix of requests from the offers."""
    demand = Demand()
    fleet = Fleet(potential=demand.potential)
    # The seed changes how ties between nodes are broken, as other node names would.
    fleet.refresh(
        FleetNode(f"{seed}/{each.name}", node_class, each.cpu_milli, each.memory_mib, (1000,) * each.gpus)
        for each in machines
        for node_class in [NodeClass(each.cpu_milli, each.memory_mib, (each.model,) * each.gpus)]
    )

    def place(task: Task) -> Placed:
        shape = Shape(task.gpus, task.gpu_milli, task.cpu_milli, task.memory_mib, frozenset(task.models))
        move = fleet.best(shape)
        if move is not None:
            fleet.take(move, shape)
        if demand.add(shape):
            fleet.reprice(demand.potential)
        return Placed(machines[move.node].name, move.gpus) if move else Placed("", ())

    return place


def by_peer(name: str, machines: Sequence[Machine], tasks: Sequence[Task], seed: int) -> Place:
    """Another policy, with the same order of nodes as for the scheduler."""
    ordered = sorted(machines, key=lambda each: -tie_of(f"{seed}/{each.name}"))
    policy = peer(name, seed)(ordered, tasks)

    def place(task: Task) -> Placed:
        found = policy.place(task)
        return Placed(ordered[found[0]].name, found[1]) if found else Placed("", ())

    return place


def run(policy: str, machines: Sequence[Machine], tasks: Sequence[Task], arrive: float, seed: int) -> Run:
    capacity = 1000 * sum(machine.gpus for machine in machines)
    offered = trace.arrivals(tasks, capacity, arrive, seed)
    place = mooring(machines, seed) if policy == "mooring" else by_peer(policy, machines, tasks, seed)
    placed, seconds = [], []
    for task in offered:
        began = time.perf_counter()
        placed.append(place(task))
        seconds.append(time.perf_counter() - began)
    return Run(seed, offered, placed, seconds, list(broken_rules(machines, offered, placed)))


def report(runs: Sequence[Run], capacity: int) -> Iterable[str]:
    scores = [each.at(capacity) for each in runs]
    yield "arrived %   mean allocated %   deviation over seeds"
    for point in POINTS:
        reached = [score[point] for score in scores if point in score]
        if reached:
            yield f"{point:9}   {statistics.fmean(reached):16.2f}   {statistics.pstdev(reached):20.2f}"
    seconds = sorted(second for each in runs for second in each.seconds)
    median, worst = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    offers = sum(len(each.offered) for each in runs)
    dropped = sum(not placement.node for each in runs for placement in each.placed)
    yield f"{offers} decisions: median {1000 * median:.2f} ms, p99 {1000 * worst:.2f} ms; {dropped} dropped"


def write(path: Path, runs: Sequence[Run]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["seed", "offer", "pod", "node", "gpu_indices", "gpu_milli"])
        for each in runs:
            for number, (task, placement) in enumerate(zip(each.offered, each.placed, strict=True)):
                indices = "-".join(map(str, placement.gpus))
                rows.writerow([each.seed, number, task.name, placement.node, indices, task.gpu_milli])


def seeds(text: str) -> list[int]:
    """`42..51`, or `42`."""
    first, _, last = text.partition("..")
    return list(range(int(first), int(last or first) + 1))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=Path)
    parser.add_argument("--pods", type=Path)
    parser.add_argument("--synthetic", action="store_true", help="a small synthetic trace instead of files")
    parser.add_argument("--arrive", type=float, default=1.3, help="stop at this multiple of all GPUs")
    parser.add_argument("--seeds", type=seeds, default="42..51")
    parser.add_argument("--policy", choices=POLICIES, default="mooring")
    parser.add_argument("--placements", type=Path, help="CSV with one row per offer")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.synthetic:
        machines, tasks = trace.synthetic(nodes=60, count=400)
    elif options.nodes and options.pods:
        machines, tasks = trace.machines(options.nodes), trace.tasks(options.pods)
    else:
        print(trace.WHERE, file=sys.stderr)
        return 2
    with ProcessPoolExecutor(options.processes) as pool:
        policy, arrive = options.policy, options.arrive
        futures = [pool.submit(run, policy, machines, tasks, arrive, seed) for seed in options.seeds]
        runs = [each.result() for each in futures]
    if options.placements:
        write(options.placements, runs)
    for line in report(runs, 1000 * sum(machine.gpus for machine in machines)):
        print(line)
    return verdict(runs)


def verdict(runs: Sequence[Run]) -> int:
    """Print the broken rules. Returns the exit status: 1 if there are any."""
    wrong = [f"seed {each.seed}: {rule}" for each in runs for rule in each.wrong]
    for line in wrong[:MAX_SHOWN]:
        print(line, file=sys.stderr)
    print(f"rules broken: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
