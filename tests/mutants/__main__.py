"""Runs mutants: removes one guard at a time in a copy of the tree and expects the named test to fail.

    python -m tests.mutants                    all of them
    python -m tests.mutants --sample 30        30 of them, chosen by the hash of the present commit
    python -m tests.mutants r7-ipc-mode-host   only these

Exits with 1 if a mutant survives: its test passes, is skipped, or cannot be run.
"""

import argparse
import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue

from tests.mutants.catalog import ROOT, Mutant, load

WORKERS = 2
TEST_TIMEOUT_S = 240
COPIED = (
    "src", "client", "tests", "migrations", "benchmarks", "docs", "scripts", "pyproject.toml", "alembic.ini",
    "README.md", "Makefile", "Dockerfile", "docker-compose.yml", ".dockerignore", "requirements.txt",
    "requirements-build.txt", "requirements-dev.txt",
)  # fmt: skip
# Installed tools are large, and no mutant changes them.
LINKED = (
    "tests/contract/node_modules",
    "tests/contract/.venv",
    "tests/sso/node_modules",
    "tests/jupyter/.venv",
    "tests/ansible/.venv",
    "tests/skypilot/.venv",
)


def main() -> int:
    options = _options()
    chosen = _chosen(options)
    began = time.monotonic()
    survivors = _run_all(chosen, options.workers)
    print(
        f"{len(chosen) - survivors} mutants killed, {survivors} survived in {time.monotonic() - began:.0f} s"
    )
    return 1 if survivors else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Remove guards, expect failing tests."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="run N mutants, chosen by the hash of the commit"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Mutant]:
    mutants = load()
    if options.names:
        unknown = set(options.names) - {mutant.name for mutant in mutants}
        if unknown:
            raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
        return [mutant for mutant in mutants if mutant.name in options.names]
    if options.sample is None:
        return mutants
    commit = _commit()
    return sorted(mutants, key=lambda mutant: _rank(commit, mutant))[: options.sample]


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _rank(commit: str, mutant: Mutant) -> str:
    return hashlib.sha256(f"{commit} {mutant.name}".encode()).hexdigest()


def _run_all(mutants: list[Mutant], workers: int) -> int:
    """Run every mutant and print a line about each; returns how many survived."""
    survivors = 0
    with (
        tempfile.TemporaryDirectory(prefix="mooring-mutants-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            trees.put(_copy_tree(Path(folder) / str(number)))
        futures = [pool.submit(_run_in_free_tree, mutant, trees) for mutant in mutants]
        for future in as_completed(futures):
            mutant, outcome, output, seconds = future.result()
            print(f"{outcome:9} {mutant.rule:5} {mutant.name} ({seconds:.1f} s): {mutant.test}", flush=True)
            if outcome != "killed":
                survivors += 1
                print(output, flush=True)
    return survivors


def _copy_tree(target: Path) -> Path:
    skipped = shutil.ignore_patterns("__pycache__", "node_modules", ".venv", ".testbed")
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skipped)
        elif source.exists():
            shutil.copy2(source, target / name)
    # Compare byte code with its source by hash: dates have a resolution of seconds, so a file that a mutant
    # changes could look unchanged.
    if not compileall.compile_dir(target, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH):
        raise SystemExit("the tree does not compile; see above")
    for name in LINKED:
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())
    return target


def _run_in_free_tree(mutant: Mutant, trees: "SimpleQueue[Path]") -> tuple[Mutant, str, str, float]:
    tree = trees.get()
    began = time.monotonic()
    try:
        original = mutant.apply(tree)
        try:
            outcome, output = _run_test(mutant, tree)
        finally:
            (tree / mutant.file).write_text(original)
    finally:
        trees.put(tree)
    return mutant, outcome, output, time.monotonic() - began


def _run_test(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Run the mutant's test in `tree`. A failed test kills; an error in collection or set-up does not."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:xdist", "--tb=line", f"--junitxml={report}", mutant.test,
    ]  # fmt: skip
    # `src` comes first, so that the copy is imported and not the installed checkout.
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return "timed out", str(expired.stdout or "")
    if run.returncode not in {0, 1} or not report.exists():
        return "error", run.stdout + run.stderr
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    if counts["failures"]:
        return "killed", ""
    outcome = "error" if counts["errors"] else "skipped" if counts["skipped"] else "survived"
    return outcome, run.stdout


if __name__ == "__main__":
    sys.exit(main())
