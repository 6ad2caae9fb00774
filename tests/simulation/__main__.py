"""`python -m tests.simulation`: runs seeds in worker processes, and prints each violation with its seed."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence


def main() -> int:
    options = _options()
    if options.worker is not None:
        from tests.simulation.worker import run_seeds  # noqa: PLC0415 - replaces the primitives of threads

        return run_seeds(options.seeds[options.worker :: options.workers], trace=options.trace)
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:], "--worker", str(number)],
            # The order of sets of strings is a part of a run.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        for number in range(min(options.workers, len(options.seeds)))
    ]
    return max(worker.wait() for worker in workers)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument(
        "--seeds", type=_seeds, default=range(1000), help="one, or the first and the last: 0-999"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _seeds(text: str) -> Sequence[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
