"""`make faults`: all faults in a random order until the time is over, at least one of each."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp

from tests.faults.catalog import chosen
from tests.faults.fleet import Fleet
from tests.faults.trial import Fault, Outcome, Trials
from tests.testbed import isolation
from tests.testbed.parts import missing
from tests.testbed.workspace import Workspace

PARTS = ("docker", "postgres", "compiler", "ext4")


def main() -> int:
    options = _options()
    if reasons := [reason for part in PARTS if (reason := missing(part))]:
        print("\n".join(reasons), file=sys.stderr)
        return 2
    rng = Random(options.seed)
    run = f"commit {_commit()}, seed {options.seed}"
    print(f"{run}, at least {options.minutes:g} minutes", flush=True)
    folder = Path(mkdtemp(prefix="mooring-faults-"))
    workspace = Workspace()
    try:
        outcomes = _run(options, workspace, folder, rng)
    finally:
        workspace.release()
    return _report(outcomes, run, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--only", default="", help="numbers of faults: F2,F8")
    parser.add_argument("--rate", type=float, default=8, help="operations per second of the clients")
    return parser.parse_args()


def _run(options: argparse.Namespace, workspace: Workspace, folder: Path, rng: Random) -> list[Outcome]:
    began = time.monotonic()
    faults = chosen(set(filter(None, options.only.split(","))))
    isolation.make_bridge(workspace.prefix, workspace.root_address)
    fleet = Fleet(workspace, workspace.root_address, folder, rng)
    try:
        print(f"3 replicas and 3 nodes are ready after {time.monotonic() - began:.0f} s", flush=True)
        trials = Trials(fleet, rng, folder / "evidence", per_s=options.rate)
        try:
            trials.begin()
            for fault in _sequence(faults, rng, began + 60 * options.minutes):
                print(trials.run(fault), flush=True)
        finally:
            trials.close()
        return trials.outcomes
    finally:
        fleet.close()


def _sequence(faults: list[Fault], rng: Random, until: float) -> Iterator[Fault]:
    """Each fault once, then again until the time is over."""
    yield from rng.sample(faults, len(faults))
    while True:
        for fault in rng.sample(faults, len(faults)):
            if time.monotonic() >= until:
                return
            yield fault


def _report(outcomes: list[Outcome], run: str, folder: Path) -> int:
    violated = [outcome for outcome in outcomes if outcome.problems]
    print(f"\n{len(outcomes)} trials, {len(violated)} with violations; {run}")
    for outcome in violated:
        print(f"\n{outcome}")
        for problem in outcome.problems:
            print(f"    {problem}")
    if violated:
        print(f"\nlogs: {folder / 'evidence'}")
        return 1
    rmtree(folder)
    return 0


def _commit() -> str:
    argv = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
