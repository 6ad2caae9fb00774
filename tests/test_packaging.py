"""The pinned requirements, the Dockerfile and docker-compose.yml agree with the code.

`scripts/try_images.py` builds and starts the images, which takes minutes.
"""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mooring
import mooring_client
from mooring.agent.settings import AgentSettings
from mooring.settings import Settings

ROOT = Path(__file__).parents[1]
PINS = ("requirements.txt", "requirements-build.txt", "requirements-dev.txt")


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9-]+)==([^ ;]+)", (ROOT / name).read_text(), flags=re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_tests_run_this_source_and_no_installed_copy() -> None:
    for package in (mooring, mooring_client):
        assert Path(package.__file__ or "").is_relative_to(ROOT / "src")


@pytest.mark.parametrize("name", PINS)
def test_every_pin_has_hashes_and_no_url(name: str) -> None:
    blocks = re.split(r"^(?=\S)", re.sub(r"^#.*\n", "", text(name), flags=re.MULTILINE), flags=re.MULTILINE)
    assert len(blocks) > 2
    for block in filter(None, blocks):
        assert re.match(
            r"[a-z0-9-]+==\S+.* \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+( +# .*\n)*$", block
        ), block
    assert "://" not in text(name)


def test_pins_satisfy_the_requirements_of_the_package() -> None:
    """If this fails after a change of pyproject.toml: `make lock`."""
    pyproject = tomllib.loads(text("pyproject.toml"))
    client = tomllib.loads(text("client/pyproject.toml"))["project"]
    own, *server = pyproject["project"]["dependencies"]
    assert own == f"{client['name']}=={mooring_client.__version__}"
    assert mooring_client.__version__ == mooring.__version__
    for name, requirements in {
        "requirements.txt": [*server, *client["dependencies"]],
        "requirements-build.txt": pyproject["build-system"]["requires"],
        "requirements-dev.txt": pyproject["project"]["optional-dependencies"]["dev"],
    }.items():
        pinned = pins(name)
        for requirement in map(Requirement, requirements):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_requirements_dev_has_the_pins_of_the_other_two() -> None:
    dev = pins("requirements-dev.txt")
    for name in PINS:
        assert pins(name).items() <= dev.items()


def test_the_dockerfile_copies_exactly_the_files_of_the_build_context() -> None:
    sent = set(re.findall(r"^!(\S+)$", text(".dockerignore"), flags=re.MULTILINE))
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text("Dockerfile"), flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == sent
    assert all((ROOT / source).exists() for source in sources)


def test_docker_compose_sets_only_variables_that_the_program_reads() -> None:
    known = {f"MOORING_{name.upper()}" for name in (Settings.model_fields | AgentSettings.model_fields)}
    known |= {"MOORING_DATABASE_ROLE_PASSWORD"}  # of `mooring db grant`
    variables = set(re.findall(r"^ +(MOORING_[A-Z_]+):", text("docker-compose.yml"), flags=re.MULTILINE))
    assert variables
    assert variables <= known


def test_no_secret_in_docker_compose_has_a_default() -> None:
    for name, option in re.findall(
        r"\$\{(\w*(?:PASSWORD|KEY|TOKEN)\w*)(:?[^}]*)\}", text("docker-compose.yml")
    ):
        assert option == "" or option.startswith(":?"), name  # `:?`: an error if unset


# A release from before the client was a distribution of its own.
OLD_WHEEL = {
    "mooring/__init__.py": "",
    "mooring/old.py": "def main():\n    print('the old script')\n",
    "mooring-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: mooring\nVersion: 0.0.1\n",
    "mooring-0.0.1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "mooring-0.0.1.dist-info/entry_points.txt": "[console_scripts]\nmooring = mooring.old:main\n",
    "mooring-0.0.1.dist-info/RECORD": "",
}
IMPORT_ALL = """
import importlib, mooring_client, pkgutil
for each in pkgutil.walk_packages(mooring_client.__path__, "mooring_client."):
    importlib.import_module(each.name)
print(mooring_client.__file__)
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    def install(self, wheels: Path, *names: str) -> None:
        """Install from a folder of wheels. What they require must be in the environment."""
        python = str(self.folder / "bin" / "python")
        _pip("--python", python, "install", "--no-index", f"--find-links={wheels}", "--no-compile", *names)

    def run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
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


def _pip(*arguments: str) -> None:
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={folder}")
    _pip("wheel", *options, str(ROOT / "client"), str(ROOT))
    return folder


@pytest.fixture
def for_client(tmp_path: Path) -> Environment:
    """What the client requires, and nothing else."""
    return _environment(tmp_path / "venv", _required_by("client/pyproject.toml"))


@pytest.fixture
def for_server(tmp_path: Path) -> Environment:
    """What the server and the client require, but not these two."""
    client, *server = _required_by("pyproject.toml")
    assert client.name == "mooring-client"
    return _environment(tmp_path / "venv", [*server, *_required_by("client/pyproject.toml")])


def _required_by(pyproject: str) -> list[Requirement]:
    return [Requirement(each) for each in tomllib.loads(text(pyproject))["project"]["dependencies"]]


def _environment(folder: Path, requirements: Iterable[Requirement]) -> Environment:
    """The packages are links to those that run this test: nothing is fetched."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in _closure(requirements).values():
        for name in {path.parts[0] for path in each.files or ()} - {"..", "__pycache__"}:
            (site / name).symlink_to(str(each.locate_file(name)))
    return Environment(folder)


def _closure(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
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


def test_the_client_alone_needs_nothing_of_the_server(for_client: Environment, wheels: Path) -> None:
    for_client.install(wheels, "mooring-client")
    assert str(for_client.folder) in for_client.run("python", "-c", IMPORT_ALL)
    for module in ("mooring", "sqlalchemy", "docker", "numpy", "fastapi", "mcp"):
        assert not for_client.knows(module), module
    shown = for_client.run("mooring", "--help")
    assert " run " in shown
    assert "join-token" not in shown
    assert for_client.run("mooring", "version") == f"{mooring_client.__version__}\n"
    assert "_MOORING_COMPLETE" in for_client.run("mooring", "completion", "bash")


def test_the_server_adds_its_commands(for_server: Environment, wheels: Path) -> None:
    for_server.install(wheels, "mooring")
    shown = for_server.run("mooring", "--help")
    assert all(f"\n  {command} " in shown for command in ("run", "up", "join-token"))
    assert "upgrade" in for_server.run("mooring", "db", "--help")


def test_an_upgrade_from_before_the_client_leaves_its_script(
    for_server: Environment, wheels: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    with zipfile.ZipFile(old / "mooring-0.0.1-py3-none-any.whl", "w") as wheel:
        for name, content in OLD_WHEEL.items():
            wheel.writestr(name, content)
    for_server.install(old, "mooring")
    assert for_server.run("mooring") == "the old script\n"
    for_server.install(wheels, "--upgrade", "mooring")
    assert for_server.run("mooring", "version") == f"{mooring_client.__version__}\n"
