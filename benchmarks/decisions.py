"""Placement decisions per second, by the size of the cluster.

    python -m benchmarks.decisions [--docs FOLDER]

Fills nine tenths of a cluster of nodes with eight GPUs with mixed requests; then as many end as are placed.
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
from typing import TYPE_CHECKING

from mooring.core.node import allocatable_memory_mib
from mooring.loops.garbage import exclude_present_objects
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import GpuView, NodeView, Request, Running, Snapshot
from mooring.scheduler.node_changes import with_placement, without
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.packing.shapes import FleetNode, Move, NodeClass, Shape
from mooring.scheduler.schedule import schedule
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
FILLED = 0.9
CLASSES = (
    NodeClass(96_000, 786_432, ("A100",) * 8),
    NodeClass(128_000, 1_048_576, ("H100",) * 8),
    NodeClass(192_000, 2_097_152, ("H100",) * 8),
)
# GPUs, thousandths of each, CPUs (milli), and how often (relative).
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
    latencies_s: list[float]  # of each decision
    filling: float  # placements per second in whole plans, while the cluster fills
    busy: float  # the same in the full cluster

    def line(self) -> str:
        latencies_s = sorted(self.latencies_s)
        median, p99 = latencies_s[len(latencies_s) // 2], latencies_s[int(len(latencies_s) * 0.99)]
        times = f"{1e6 * median:9.0f} | {1e6 * p99:6.0f}"
        rates = f"{self.filling:9,.0f} | {self.busy:6,.0f} | {self.alone:7,.0f}"
        return f"| {self.nodes:6,} | {8 * self.nodes:6,} | {rates} | {times} |"

    @property
    def alone(self) -> float:
        return len(self.latencies_s) / self.seconds


def requests(seed: int) -> Iterator[Shape]:
    dice = random.Random(seed)
    often = [each[3] for each in MIX]
    while True:
        gpus, milli, cpu_milli, _ = dice.choices(MIX, often)[0]
        models = dice.choices(MODELS, (8, 1, 1))[0] if gpus else frozenset[str]()
        owner = f"project-{dice.randrange(OWNERS)}" if gpus and milli < WHOLE_MILLI else ""
        yield Shape(gpus, milli, cpu_milli, 4 * cpu_milli, models, owner)


def measure(nodes: int, decisions: int) -> Rate:
    seconds, latencies_s = alone(nodes, decisions)
    return Rate(nodes, seconds, latencies_s, *planned(nodes, decisions))


def alone(nodes: int, decisions: int, seed: int = 1) -> tuple[float, list[float]]:
    """Measure decisions of the fleet alone: seconds in total, and of each decision."""
    dice = random.Random(seed)
    shapes = requests(seed)
    demand = Demand()
    fleet = Fleet(potential=demand.potential)
    fleet.refresh(
        FleetNode(
            f"node-{number}", node_class, node_class.cpu_milli, node_class.memory_mib, (WHOLE_MILLI,) * 8
        )
        for number in range(nodes)
        for node_class in [CLASSES[number % len(CLASSES)]]
    )
    running: list[tuple[Move, Shape]] = []
    allocated = 0
    while allocated < FILLED * nodes * 8 * WHOLE_MILLI:
        shape = next(shapes)
        if placed := _place(fleet, demand, shape):
            running.append((placed, shape))
            allocated += shape.gpus * shape.gpu_milli
    latencies_s: list[float] = []
    seconds = 0.0
    while len(latencies_s) < decisions:
        while allocated > FILLED * nodes * 8 * WHOLE_MILLI:
            at = dice.randrange(len(running))
            running[at], running[-1] = running[-1], running[at]
            move, shape = running.pop()
            fleet.give_back(move, shape)
            allocated -= shape.gpus * shape.gpu_milli
        shape = next(shapes)
        began = time.perf_counter()
        found = _place(fleet, demand, shape)
        latencies_s.append(time.perf_counter() - began)
        seconds += latencies_s[-1]
        if found:
            running.append((found, shape))
            allocated += shape.gpus * shape.gpu_milli
    return seconds, latencies_s


def _place(fleet: Fleet, demand: Demand, shape: Shape) -> Move | None:
    move = fleet.best(shape)
    if move is not None:
        fleet.take(move, shape)
    if demand.add(shape):
        fleet.reprice(demand.potential)
    return move


class Cluster:
    """A cluster with nodes as the control plane passes them: only those that changed are new objects."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._dice = random.Random(seed)
        self._shapes = requests(seed)
        self._nodes = {node.id: node for node in map(_node, range(nodes))}
        self._running: list[tuple[str, Running]] = []
        self._cache, self._learning = CycleCache(), Learning()
        self._milli = 0
        self._full = int(FILLED * nodes * 8 * WHOLE_MILLI)
        self._requested = 0

    @property
    def filled(self) -> bool:
        return self._milli >= self._full

    def plan(self, waiting: int) -> float:
        """Plan once. Returns placements per second."""
        requests_by_id = {request.instance_id: request for request in self._requests(waiting)}
        snapshot = Snapshot(
            tuple(self._nodes.values()), tuple(requests_by_id.values()), now=float(self._requested)
        )
        began = time.perf_counter()
        snapshot = self._learning.learn(snapshot, self._cache)
        plan = schedule(snapshot, self._cache)
        seconds = time.perf_counter() - began
        for placed in plan.placements:
            request = requests_by_id[placed.instance_id]
            node = with_placement(self._nodes[placed.node_id], placed, request, snapshot.at)
            self._nodes[node.id] = node
            self._running.append((node.id, node.running[-1]))
            self._milli += node.running[-1].gpu_milli
        return len(plan.placements) / seconds

    def settle(self) -> None:
        """Exclude the cluster from garbage collections, as the scheduling loop does with many nodes."""
        exclude_present_objects()

    def end_some(self) -> None:
        """End random instances until no more than `FILLED` is allocated."""
        while self._milli > self._full:
            at = self._dice.randrange(len(self._running))
            self._running[at], self._running[-1] = self._running[-1], self._running[at]
            node_id, ended = self._running.pop()
            self._nodes[node_id] = without(self._nodes[node_id], [ended])
            self._milli -= ended.gpu_milli

    def _requests(self, count: int) -> Iterable[Request]:
        for shape in islice(self._shapes, count):
            self._requested += 1
            yield Request(
                instance_id=f"ins-{self._requested:08}",
                queued_at=float(self._requested),
                gpu_count=shape.gpus,
                gpu_milli=shape.gpu_milli or WHOLE_MILLI,
                gpu_models=tuple(shape.models),
                gpu_min_memory_mib=None,
                cpu_milli=shape.cpu_milli,
                memory_mib=shape.memory_mib,
                node_selector={},
                project_id=shape.owner or f"project-{self._requested % OWNERS}",
            )


def _node(number: int) -> NodeView:
    node_class = CLASSES[number % len(CLASSES)]
    uuids = [f"GPU-{number}-{index}" for index in range(8)]
    gpus = (
        GpuView(
            uuid=uuid,
            index=index,
            model=node_class.models[index],
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
        cpu_milli=node_class.cpu_milli,
        memory_mib=node_class.memory_mib,
        cpu_milli_free=node_class.cpu_milli,
        memory_mib_free=allocatable_memory_mib(node_class.memory_mib),
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
    options = parser.parse_args(argv)
    print("\n".join(HEAD))
    rates = []
    for nodes in options.nodes:
        rates.append(measure(nodes, options.decisions))
        print(rates[-1].line(), flush=True)
    if options.docs:
        (options.docs / "decisions.md").write_text(
            "\n".join([*HEAD, *(rate.line() for rate in rates)]) + "\n"
        )
        _draw(rates, options.docs / "decisions.svg")


def _draw(rates: Sequence[Rate], path: Path) -> None:
    from benchmarks.plots import plot  # noqa: PLC0415 - matplotlib takes a second, and most runs draw nothing

    plot(path, lambda axes: _curves(axes, rates))


def _curves(axes: "Axes", rates: Sequence[Rate]) -> None:
    nodes = [rate.nodes for rate in rates]
    axes.plot(nodes, [rate.alone for rate in rates], marker="o", label="decisions of the fleet alone")
    axes.plot(nodes, [rate.filling for rate in rates], marker="o", label="whole plans, much room")
    axes.plot(nodes, [rate.busy for rate in rates], marker="o", label="whole plans, nine tenths full")
    axes.axhline(WANTED_PER_S, color="grey", linestyle="--", label=f"{WANTED_PER_S:,} a second")
    axes.set(xlabel="nodes of eight GPUs", ylabel="a second, one process", xscale="log", ylim=(0, None))
    axes.legend()


if __name__ == "__main__":
    main()
