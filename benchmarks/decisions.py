"""Placement decisions per second, by the size of the cluster.

    python -m benchmarks.decisions [--docs FOLDER]

Fills a cluster of nodes with eight GPUs to nine tenths with mixed requests; then as many end as are placed.
In such a busy cluster, nearly all nodes have different states and some requests must wait. Measures whole
plans, as the loop makes them (`schedule()` with up to 1,000 pending instances and a warm cache), and
decisions of the fleet alone, which selects the node and the GPUs. One process without a database;
`benchmarks.placing` has one.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState, allocatable_memory_mib
from mooring.loops.scheduling import freeze_gc
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import GpuView, NodeView, Request, Running, Snapshot
from mooring.scheduler.node_changes import with_placement, without
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.packing.shapes import FleetNode, Move, NodeClass, Shape
from mooring.scheduler.schedule import schedule

SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
FILLED = 0.9
KINDS = (
    NodeClass(96_000, 786_432, ("A100",) * 8),
    NodeClass(128_000, 1_048_576, ("H100",) * 8),
    NodeClass(192_000, 2_097_152, ("H100",) * 8),
)
# GPUs, thousandths of each, CPUs (milli), and how often.
MIX = (
    (1, WHOLE_MILLI, 8000, 25),
    (1, WHOLE_MILLI, 12_000, 20),
    (1, WHOLE_MILLI, 16_000, 8),
    (1, 500, 6000, 10),
    (1, 250, 4000, 10),
    (1, 125, 2000, 5),
    (1, 800, 8000, 6),
    (0, 0, 8000, 6),
    (2, WHOLE_MILLI, 24_000, 4),
    (4, WHOLE_MILLI, 48_000, 3),
    (8, WHOLE_MILLI, 90_000, 3),
)
MODELS = (frozenset[str](), frozenset({"H100"}), frozenset({"A100"}))
OWNERS = 8
MIN_PLANS = 20
MAX_PENDING = 1000  # half a second of arrivals at the wanted rate
WANTED_PER_S = 2000
HEAD = (
    "|  nodes |   GPUs | filling/s | busy/s | alone/s | median us | p99 us |",
    "|-------:|-------:|----------:|-------:|--------:|----------:|-------:|",
)


@dataclass(frozen=True)
class Rate:
    nodes: int
    seconds: float
    waits: list[float]  # seconds per decision
    filling: float  # placements per second in whole plans, while the cluster fills
    busy: float  # the same in the full cluster

    def line(self) -> str:
        waits = sorted(self.waits)
        median, high = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        each = f"{1e6 * median:9.0f} | {1e6 * high:6.0f}"
        rates = f"{self.filling:9,.0f} | {self.busy:6,.0f} | {self.alone:7,.0f}"
        return f"| {self.nodes:6,} | {8 * self.nodes:6,} | {rates} | {each} |"

    @property
    def alone(self) -> float:
        return len(self.waits) / self.seconds


def requests(seed: int) -> Iterator[Shape]:
    dice = random.Random(seed)
    often = [each[3] for each in MIX]
    while True:
        gpus, milli, cpu_milli, _ = dice.choices(MIX, often)[0]
        models = dice.choices(MODELS, (8, 1, 1))[0] if gpus else frozenset[str]()
        owner = f"project-{dice.randrange(OWNERS)}" if gpus and milli < WHOLE_MILLI else ""
        yield Shape(gpus, milli, cpu_milli, 4 * cpu_milli, models, owner)


def measure(nodes: int, decisions: int) -> Rate:
    seconds, waits = alone(nodes, decisions)
    return Rate(nodes, seconds, waits, *planned(nodes, decisions))


def alone(nodes: int, decisions: int, seed: int = 1) -> tuple[float, list[float]]:
    """Seconds in total, and per decision."""
    dice = random.Random(seed)
    asked = requests(seed)
    demand = Demand()
    fleet = Fleet(potential=demand.potential)
    fleet.refresh(
        FleetNode(f"node-{number}", kind, kind.cpu_milli, kind.memory_mib, (WHOLE_MILLI,) * 8)
        for number in range(nodes)
        for kind in [KINDS[number % len(KINDS)]]
    )
    running: list[tuple[Move, Shape]] = []
    allocated = 0
    while allocated < FILLED * nodes * 8 * WHOLE_MILLI:
        shape = next(asked)
        if placed := _place(fleet, demand, shape):
            running.append((placed, shape))
            allocated += shape.gpus * shape.gpu_milli
    waits: list[float] = []
    seconds = 0.0
    while len(waits) < decisions:
        while allocated > FILLED * nodes * 8 * WHOLE_MILLI:
            at = dice.randrange(len(running))
            running[at], running[-1] = running[-1], running[at]
            move, shape = running.pop()
            fleet.give_back(move, shape)
            allocated -= shape.gpus * shape.gpu_milli
        shape = next(asked)
        began = time.perf_counter()
        found = _place(fleet, demand, shape)
        waits.append(time.perf_counter() - began)
        seconds += waits[-1]
        if found:
            running.append((found, shape))
            allocated += shape.gpus * shape.gpu_milli
    return seconds, waits


def _place(fleet: Fleet, demand: Demand, shape: Shape) -> Move | None:
    move = fleet.best(shape)
    if move is not None:
        fleet.take(move, shape)
    if demand.offer(shape):
        fleet.reprice(demand.potential)
    return move


class Cluster:
    """Nodes as the control plane passes them: only those that changed are new objects."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._dice = random.Random(seed)
        self._shapes = requests(seed)
        self._nodes = {node.id: node for node in map(_node, range(nodes))}
        self._running: list[tuple[str, Running]] = []
        self._cache, self._learning = CycleCache(), Learning()
        self._milli = 0
        self._full = int(FILLED * nodes * 8 * WHOLE_MILLI)
        self._asked = 0

    @property
    def filled(self) -> bool:
        return self._milli >= self._full

    def plan(self, waiting: int) -> float:
        """Plan once. Returns placements per second."""
        asked = {request.instance_id: request for request in self._requests(waiting)}
        snapshot = Snapshot(tuple(self._nodes.values()), tuple(asked.values()), now=float(self._asked))
        began = time.perf_counter()
        snapshot = self._learning.learn(snapshot, self._cache)
        plan = schedule(snapshot, self._cache)
        seconds = time.perf_counter() - began
        for placed in plan.placements:
            request = asked[placed.instance_id]
            node = with_placement(self._nodes[placed.node_id], placed, request, snapshot.at)
            self._nodes[node.id] = node
            self._running.append((node.id, node.running[-1]))
            self._milli += node.running[-1].gpu_milli
        return len(plan.placements) / seconds

    def settle(self) -> None:
        """As the scheduling loop does after it has loaded all nodes."""
        freeze_gc(tuple(self._nodes.values()))

    def end_some(self) -> None:
        while self._milli > self._full:
            at = self._dice.randrange(len(self._running))
            self._running[at], self._running[-1] = self._running[-1], self._running[at]
            node_id, ended = self._running.pop()
            self._nodes[node_id] = without(self._nodes[node_id], [ended])
            self._milli -= ended.gpu_milli

    def _requests(self, count: int) -> Iterable[Request]:
        for shape in islice(self._shapes, count):
            self._asked += 1
            yield Request(
                instance_id=f"ins-{self._asked:08}",
                queued_at=float(self._asked),
                gpu_count=shape.gpus,
                gpu_milli=shape.gpu_milli or WHOLE_MILLI,
                gpu_models=tuple(shape.models),
                gpu_min_memory_mib=None,
                cpu_milli=shape.cpu_milli,
                memory_mib=shape.memory_mib,
                node_selector={},
                project_id=shape.owner or f"project-{self._asked % OWNERS}",
            )


def _node(number: int) -> NodeView:
    kind = KINDS[number % len(KINDS)]
    uuids = [f"GPU-{number}-{index}" for index in range(8)]
    gpus = (
        GpuView(
            uuid=uuid,
            index=index,
            model=kind.models[index],
            memory_mib=81_559,
            healthy=True,
            nvlink={other: 18 for other in uuids if other != uuid},
            topology={other: "system" for other in uuids if other != uuid},
        )
        for index, uuid in enumerate(uuids)
    )
    return NodeView(
        id=f"nod_{number:06}",
        name=f"gpu-{number}",
        state=NodeState.READY,
        labels={},
        cpu_milli=kind.cpu_milli,
        memory_mib=kind.memory_mib,
        cpu_milli_free=kind.cpu_milli,
        memory_mib_free=allocatable_memory_mib(kind.memory_mib),
        gpus=tuple(gpus),
    )


def planned(nodes: int, decisions: int, seed: int = 1) -> tuple[float, float]:
    """Median placements per second of whole plans: while the cluster fills, and when it is full."""
    cluster = Cluster(nodes, seed)
    waiting = min(MAX_PENDING, nodes // 2)  # most of them fit
    filling: list[float] = []
    while not cluster.filled:
        filling.append(cluster.plan(waiting))
        if len(filling) == 1:
            cluster.settle()
    busy: list[float] = []
    while len(busy) * waiting < decisions or len(busy) < MIN_PLANS:
        cluster.end_some()
        busy.append(cluster.plan(waiting))
    return statistics.median(filling), statistics.median(busy)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--decisions", type=int, default=10_000, help="measured for each size")
    parser.add_argument("--docs", type=Path, help="a folder for the table and the curve")
    asked = parser.parse_args(argv)
    print("\n".join(HEAD))
    rates = []
    for nodes in asked.nodes:
        rates.append(measure(nodes, asked.decisions))
        print(rates[-1].line(), flush=True)
    if asked.docs:
        (asked.docs / "decisions.md").write_text("\n".join([*HEAD, *(rate.line() for rate in rates)]) + "\n")
        _draw(rates, asked.docs / "decisions.svg")


def _draw(rates: Sequence[Rate], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - takes a second, and most runs draw nothing
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    nodes = [rate.nodes for rate in rates]
    axes.plot(nodes, [rate.alone for rate in rates], marker="o", label="decisions of the fleet alone")
    axes.plot(nodes, [rate.filling for rate in rates], marker="o", label="whole plans, much room")
    axes.plot(nodes, [rate.busy for rate in rates], marker="o", label="whole plans, nine tenths full")
    axes.axhline(WANTED_PER_S, color="grey", linestyle="--", label=f"{WANTED_PER_S:,} a second")
    axes.set(xlabel="nodes of eight GPUs", ylabel="a second, one process", xscale="log", ylim=(0, None))
    axes.legend()
    with mpl.rc_context({"svg.hashsalt": "mooring"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
