"""GPUs with a warning are given out where nothing else fits, and then they are."""

from dataclasses import replace

from mooring.scheduler.model import GpuView


def _warned(cards: tuple[GpuView, ...], *places: int) -> tuple[GpuView, ...]:
    return tuple(replace(gpu, last=place in places) for place, gpu in enumerate(cards))
