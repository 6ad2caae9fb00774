"""External programs that test the API; install.sh installs them."""

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
_LINTERS = FOLDER / "node_modules" / ".bin"
_PYTHON_TOOLS = FOLDER / ".venv" / "bin"


def linter(name: str) -> Path:
    """A program from package.json."""
    return _required(_LINTERS / name)


def python_tool(name: str) -> Path:
    """A program from requirements.txt."""
    return _required(_PYTHON_TOOLS / name)


def _required(program: Path) -> Path:
    """Skips the test if the program is missing; fails it under CI=true."""
    if program.exists():
        return program
    reason = f"{program.name}: not installed; run tests/testbed/install.sh"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def run(
    *argv: str | Path, stdin: Path = Path(os.devnull), timeout_s: float = 250, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program; the result has its standard output and error together.

    Its standard input is a file, since Node.js does not read a pipe that is not full yet.
    """
    with stdin.open() as standard_input:
        return subprocess.run(
            argv,
            stdin=standard_input,
            cwd=FOLDER,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
