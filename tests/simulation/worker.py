"""One worker process: it runs its seeds one after another."""

from tests.simulation import virtual

virtual.install()

# ruff: noqa: E402 - everything else must see the virtual primitives
import gc
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import process_time

from mooring.db import migrate
from tests import compiled_statements
from tests.simulation.world import World

_SHOWN = 60


def run_seeds(seeds: Iterable[int], *, trace: bool) -> int:
    """Run each seed. Returns 1 if any of them found a violation."""
    if trace:
        logging.getLogger("mooring").addHandler(_Trace())
        logging.getLogger("mooring").setLevel(logging.INFO)
    else:
        logging.disable(logging.CRITICAL)
    compiled_statements.share()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=_memory()) as folder:
        template = Path(folder) / "template.db"
        migrate.upgrade(f"sqlite:///{template}")
        for seed in seeds:
            failed += not _run(seed, Path(folder) / str(seed), template, trace=trace)
    return min(failed, 1)


class _Trace(logging.Handler):
    """Shows what the product logs, with the time of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        running = virtual.hub()
        process = running.current.process.name if running.current else "main"
        print(f"{running.now:9.3f}   {process}: {record.getMessage()}")


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _run(seed: int, folder: Path, template: Path, *, trace: bool) -> bool:
    folder.mkdir()
    gc.collect()
    gc.freeze()  # what is left are modules and caches, which need not be looked through again after each run
    gc.disable()  # a tenth of the time of a run
    began = process_time()
    world = World(seed, folder, template, trace=trace)
    try:
        world.run()
        digest = world.digest()
        if trace:
            world.show_events()
    finally:
        world.close()
        shutil.rmtree(folder)
    took_s = process_time() - began
    if world.violations:
        _show(world)
    events = f"{world.hub.switches} steps, {len(world.history.creates)} creates"
    print(
        f"seed {seed}: {digest}, {events}, {took_s:.2f} s of CPU, {len(world.violations)} violations",
        flush=True,
    )
    return not world.violations


def _show(world: World) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"--- seed {world.seed} of commit {commit}, the last things that happened:", file=sys.stderr)
    print(*list(world.log)[-_SHOWN:], sep="\n", file=sys.stderr)
    print(*(f"VIOLATION {text}" for text in world.violations), sep="\n", file=sys.stderr, flush=True)
