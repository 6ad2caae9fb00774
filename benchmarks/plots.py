"""Writes a plot as SVG; equal figures give equal bytes."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plot(path: Path, draw: Callable[[Axes], object]) -> None:
    mpl.rcParams["svg.hashsalt"] = "mooring"
    figure = Figure(figsize=(8, 4), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, metadata={"Date": None})
