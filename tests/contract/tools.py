"""The programs that read the API from outside, as install.sh puts them here."""

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
_LINTERS = FOLDER / "node_modules" / ".bin"
_PYTHON_TOOLS = FOLDER / ".venv" / "bin"


def linter(name: str) -> Path:
    """A program of package.json."""
    return _required(_LINTERS / name)


def python_tool(name: str) -> Path:
    """A program of requirements.txt."""
    return _required(_PYTHON_TOOLS / name)


def _required(program: Path) -> Path:
    """Skips the test where it is missing; under CI=true fails it."""
    if program.exists():
        return program
    reason = f"{program.name}: not installed; run tests/testbed/install.sh"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def run(
    *argv: str | Path, stdin: Path = Path(os.devnull), timeout_s: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """One program with what it printed, standard output and error in one.

    Its standard input is a file: Node.js reads nothing from a pipe that is not full yet.
    """
    with stdin.open() as given:
        return subprocess.run(
            argv,
            stdin=given,
            cwd=FOLDER,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
