"""The curves of docs/scale.md: creates by the number of clients, and the servers' CPU by the number of nodes.

    python -m benchmarks.scale [--only creates|nodes] [--docs docs/scale]

Both take 25 minutes on two cores, creates alone ten. Prints each figure, and draws the curves into the
folder `docs`.
"""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import creates, nodes
from benchmarks.plots import plot

Curve = Sequence[tuple[float, float]]

SERVERS = {
    "SQLite": ("sqlite", 1),
    "PostgreSQL": ("postgresql", 1),
    "PostgreSQL, 3 replicas": ("postgresql", 3),
}
PARTS = ("creates", "nodes")
CLIENTS = (1, 2, 4, 8, 16, 24, 48)
CREATES_S = 6.0
NODES = (100, 300, 1000, 3000)
# Thousands of nodes take minutes to join PostgreSQL.
NODES_ON_POSTGRESQL = (100, 300, 1000)


def main(parts: Collection[str], docs: Path | None) -> int:
    curves: dict[tuple[str, str, str], Mapping[str, Curve]] = {}
    if "creates" in parts:
        made = {
            name: [(clients, creates.measured(CREATES_S, *servers, clients)) for clients in CLIENTS]
            for name, servers in SERVERS.items()
        }
        curves["creates.svg", "clients", "creates a second"] = {
            name: [(x, each.rate) for x, each in curve] for name, curve in made.items()
        }
        curves["creates-p99.svg", "clients", "99th percentile of a create, ms"] = {
            name: [(x, 1e3 * each.p99_s) for x, each in curve] for name, curve in made.items()
        }
    if "nodes" in parts:
        curves["nodes.svg", "nodes", "CPU of the servers, % of a core"] = {
            name: [
                (size, 100 * nodes.measured(size, *servers, only_heartbeats=True).share)
                for size in (NODES if servers[0] == "sqlite" else NODES_ON_POSTGRESQL)
            ]
            for name, servers in SERVERS.items()
        }
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        for (file, x, y), drawn in curves.items():
            _draw(docs / file, drawn, x, y)
    return 0


def _draw(path: Path, curves: Mapping[str, Curve], x: str, y: str) -> None:
    def draw(axes: Axes) -> None:
        for name, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), marker="o", label=name)
        axes.set(xlabel=x, ylabel=y, xlim=(0, None), ylim=(0, None))
        axes.legend()

    plot(path, draw)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=PARTS, help="measure only this")
    parser.add_argument("--docs", type=Path, help="folder for the curves")
    given = parser.parse_args()
    sys.exit(main([given.only] if given.only else PARTS, given.docs))
