"""Virtual environments of their own, for the wheels of this source tree; nothing is fetched."""

import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    def install(self, wheels: Path, *names: str, compiled: bool = False) -> None:
        """Install from a folder of wheels. What they require must be in the environment."""
        options = ("--no-index", f"--find-links={wheels}", "--compile" if compiled else "--no-compile")
        _pip("--python", str(self.program("python")), "install", *options, *names)

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def run(self, program: str, *arguments: str) -> str:
        """What a program prints. It must succeed."""
        done = subprocess.run(
            [self.program(program), *arguments],
            check=False,
            cwd=self.folder,
            env={"HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def knows(self, module: str) -> bool:
        found = self.run("python", "-c", f"import importlib.util as i; print(i.find_spec({module!r}))")
        return found.strip() != "None"


def for_client(folder: Path) -> Environment:
    """An environment with what the client requires, and nothing else."""
    return _environment(folder, _required_by("client/pyproject.toml"))


def for_server(folder: Path) -> Environment:
    """An environment with what the server and the client require, but not these two."""
    client, *server = _required_by("pyproject.toml")
    assert client.name == "mooring-client"
    return _environment(folder, [*server, *_required_by("client/pyproject.toml")])


def build_wheels(folder: Path, *sources: Path) -> None:
    """Build the wheels of projects into a folder."""
    options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={folder}")
    _pip("wheel", *options, *map(str, sources))


def _required_by(pyproject: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / pyproject).read_text())["project"]
    return [Requirement(each) for each in project["dependencies"]]


def _environment(folder: Path, requirements: Iterable[Requirement]) -> Environment:
    """The packages are links to those of the environment that this program runs in."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in _closure(requirements).values():
        for name in {path.parts[0] for path in each.files or ()} - {"..", "__pycache__"}:
            (site / name).symlink_to(str(each.locate_file(name)))
    return Environment(folder)


def _closure(requirements: Iterable[Requirement]) -> Mapping[str, Distribution]:
    """The installed distributions that satisfy the requirements, with those that these require in turn."""
    found: dict[str, Distribution] = {}
    left = list(requirements)
    while left:
        wanted = left.pop()
        each = found.setdefault(canonicalize_name(wanted.name), distribution(wanted.name))
        for requirement in map(Requirement, each.requires or ()):
            extras = {"", *wanted.extras}
            needed = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras
            )
            if needed and canonicalize_name(requirement.name) not in found:
                left.append(requirement)
    return found


def _pip(*arguments: str) -> None:
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
