"""The kinds of obstacles that keep a request from a node."""

from enum import IntEnum, auto

# The code of a refusal, what was wanted, and what the node had.
Reason = tuple[str, str, str]


class Stage(IntEnum):
    """In the order of `summary`: permanent obstacles before temporary ones."""

    LABELS = auto()
    RESERVED = auto()
    VOLUMES = auto()
    MODEL = auto()
    MODE = auto()
    SIZE = auto()
    CAPABILITY = auto()
    STATE = auto()
    COUNT = auto()
    BESIDE = auto()  # CPUs, memory, disk, and rules without a stage of their own
    FITS = auto()  # no obstacle
