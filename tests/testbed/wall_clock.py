"""Sets the wall clock of single processes, as if the clock of their machine were set."""

import os
import subprocess
from datetime import timedelta
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class WallClock:
    """The wall clock of processes that run with `environment`. It shows the true time at first.

    CLOCK_MONOTONIC, CLOCK_BOOTTIME and timeouts are not affected, as on a machine whose clock is set.
    """

    def __init__(self, folder: Path) -> None:
        library = folder / "wall_clock.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE],
            check=True,
        )
        self._shift = folder / "wall_clock.shift"
        self._shift.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(self._shift)}

    def shift(self, by: timedelta) -> None:
        """Let the clock show the true time plus `by`."""
        # Not truncated first: the processes have the file mapped.
        with self._shift.open("r+b", buffering=0) as file:
            os.write(file.fileno(), round(by.total_seconds()).to_bytes(8, "little", signed=True))
