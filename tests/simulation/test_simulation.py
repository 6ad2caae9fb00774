"""A few runs of the simulation. `.ci/run` makes 1,000 by `make simulation`."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)  # CPU time only, but the machine may be busy

_DIGEST = re.compile(r"^seed (\d+): (\w+), ", re.MULTILINE)


def digests(seeds: str) -> dict[int, str]:
    """Run seeds in one process. What happened in each, as a hash."""
    command = [sys.executable, "-m", "tests.simulation", "--seeds", seeds, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(seed): digest for seed, digest in _DIGEST.findall(done.stdout)}


def test_the_invariants_hold_and_a_seed_is_repeated_exactly() -> None:
    """Also in another process, after other seeds."""
    together = digests("0-5")
    assert len(set(together.values())) == 6
    for seed in (2, 5):
        assert digests(str(seed)) == {seed: together[seed]}
