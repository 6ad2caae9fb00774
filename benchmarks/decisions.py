"""How many placements a second are decided, and how that falls as the cluster grows.

    python -m benchmarks.decisions

A cluster of nodes of eight GPUs is filled to nine tenths with mixed requests, and then as many end as are
placed: that is a busy cluster, where nearly every node is in a state of its own. The numbers are of
the scheduler's fleet alone, in one process, without a database.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooring.scheduler.demand import Demand
from mooring.scheduler.fleet import Fleet
from mooring.scheduler.shapes import WHOLE, FleetNode, Move, NodeClass, Shape

SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
FILLED = 0.9
KINDS = (
    NodeClass(96_000, 786_432, ("A100",) * 8),
    NodeClass(128_000, 1_048_576, ("H100",) * 8),
    NodeClass(192_000, 2_097_152, ("H100",) * 8),
)
# GPUs, thousandths of each, CPUs (milli), and how often.
MIX = (
    (1, WHOLE, 8000, 25),
    (1, WHOLE, 12_000, 20),
    (1, WHOLE, 16_000, 8),
    (1, 500, 6000, 10),
    (1, 250, 4000, 10),
    (1, 125, 2000, 5),
    (1, 800, 8000, 6),
    (0, 0, 8000, 6),
    (2, WHOLE, 24_000, 4),
    (4, WHOLE, 48_000, 3),
    (8, WHOLE, 90_000, 3),
)
MODELS = (frozenset[str](), frozenset({"H100"}), frozenset({"A100"}))
OWNERS = 8


@dataclass(frozen=True)
class Rate:
    nodes: int
    decided: int
    seconds: float
    waits: list[float]  # each decision's

    def line(self) -> str:
        waits = sorted(self.waits)
        median, high = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        each = f"{1e6 * median:10.0f} {1e6 * high:10.0f}"
        return f"{self.nodes:6} {8 * self.nodes:7} {self.decided:8} {self.decided / self.seconds:9.0f} {each}"


def requests(seed: int) -> Iterator[Shape]:
    dice = random.Random(seed)
    often = [each[3] for each in MIX]
    while True:
        gpus, milli, cpu_milli, _ = dice.choices(MIX, often)[0]
        models = dice.choices(MODELS, (8, 1, 1))[0] if gpus else frozenset[str]()
        owner = f"project-{dice.randrange(OWNERS)}" if gpus and milli < WHOLE else ""
        yield Shape(gpus, milli, cpu_milli, 4 * cpu_milli, models, owner)


def measure(nodes: int, decisions: int, seed: int = 1) -> Rate:
    dice = random.Random(seed)
    asked = requests(seed)
    demand = Demand()
    fleet = Fleet(potential=demand.potential)
    fleet.refresh(
        FleetNode(f"node-{number}", kind, kind.cpu_milli, kind.memory_mib, (WHOLE,) * 8)
        for number in range(nodes)
        for kind in [KINDS[number % len(KINDS)]]
    )
    running: list[tuple[Move, Shape]] = []
    given = 0
    while given < FILLED * nodes * 8 * WHOLE:
        shape = next(asked)
        if placed := _place(fleet, demand, shape):
            running.append((placed, shape))
            given += shape.gpus * shape.gpu_milli
    waits: list[float] = []
    seconds = 0.0
    while len(waits) < decisions:
        while given > FILLED * nodes * 8 * WHOLE:
            at = dice.randrange(len(running))
            running[at], running[-1] = running[-1], running[at]
            move, shape = running.pop()
            fleet.give_back(move, shape)
            given -= shape.gpus * shape.gpu_milli
        shape = next(asked)
        began = time.perf_counter()
        found = _place(fleet, demand, shape)
        waits.append(time.perf_counter() - began)
        seconds += waits[-1]
        if found:
            running.append((found, shape))
            given += shape.gpus * shape.gpu_milli
    return Rate(nodes, decisions, seconds, waits)


def _place(fleet: Fleet, demand: Demand, shape: Shape) -> Move | None:
    move = fleet.best(shape)
    if move is not None:
        fleet.take(move, shape)
    if demand.offer(shape):
        fleet.reprice(demand.potential)
    return move


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--decisions", type=int, default=10_000, help="measured for each size")
    asked = parser.parse_args(argv)
    print(" nodes    GPUs  decided  a second  median us     p99 us")
    for nodes in asked.nodes:
        print(measure(nodes, asked.decisions).line(), flush=True)


if __name__ == "__main__":
    main()
