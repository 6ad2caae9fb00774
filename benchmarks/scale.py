"""The curves of docs/scale.md: creates by the number of clients, and the servers' CPU by the number of nodes.

    python -m benchmarks.scale [--docs docs/scale]

Takes twenty minutes on two cores. Prints each figure, and draws the curves into that folder.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
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
CLIENTS = (1, 2, 4, 8, 16, 24, 48)
CREATES_S = 6.0
NODES = (100, 300, 1000, 3000)
# Thousands of nodes take minutes to join PostgreSQL.
NODES_ON_POSTGRESQL = (100, 300, 1000)


def main(docs: Path | None) -> int:
    made = {
        name: [(clients, creates.measured(CREATES_S, *servers, clients)) for clients in CLIENTS]
        for name, servers in SERVERS.items()
    }
    cpu = {
        name: [
            (size, 100 * nodes.measured(size, *servers, only_heartbeats=True).share)
            for size in (NODES if servers[0] == "sqlite" else NODES_ON_POSTGRESQL)
        ]
        for name, servers in SERVERS.items()
    }
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        rates = {name: [(x, each.rate) for x, each in curve] for name, curve in made.items()}
        slowest = {name: [(x, 1e3 * each.p99_s) for x, each in curve] for name, curve in made.items()}
        _draw(docs / "creates.svg", rates, "clients", "creates a second")
        _draw(docs / "creates-p99.svg", slowest, "clients", "99th percentile of a create, ms")
        _draw(docs / "nodes.svg", cpu, "nodes", "CPU of the servers, % of a core")
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
    parser.add_argument("--docs", type=Path, help="folder for the curves")
    sys.exit(main(parser.parse_args().docs))
