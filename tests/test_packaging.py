"""The pinned requirements, the Dockerfile and docker-compose.yml agree with the code.

`scripts/try_images.py` builds and starts the images, which takes minutes.
"""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mooring
import mooring_client
from mooring.agent.settings import AgentSettings
from mooring.settings import Settings
from tests.environments import Environment, build_wheels, for_client, for_server

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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build_wheels(folder, ROOT / "client", ROOT)
    return folder


@pytest.fixture
def client_environment(tmp_path: Path) -> Environment:
    return for_client(tmp_path / "venv")


@pytest.fixture
def server_environment(tmp_path: Path) -> Environment:
    return for_server(tmp_path / "venv")


def test_the_client_alone_needs_nothing_of_the_server(client_environment: Environment, wheels: Path) -> None:
    client_environment.install(wheels, "mooring-client")
    assert str(client_environment.folder) in client_environment.run("python", "-c", IMPORT_ALL)
    for module in ("mooring", "sqlalchemy", "docker", "numpy", "fastapi", "mcp"):
        assert not client_environment.knows(module), module
    shown = client_environment.run("mooring", "--help")
    assert " run " in shown
    assert "join-token" not in shown
    assert client_environment.run("mooring", "version") == f"{mooring_client.__version__}\n"
    assert "_MOORING_COMPLETE" in client_environment.run("mooring", "completion", "bash")


def test_the_server_adds_its_commands(server_environment: Environment, wheels: Path) -> None:
    server_environment.install(wheels, "mooring")
    shown = server_environment.run("mooring", "--help")
    assert all(f"\n  {command} " in shown for command in ("run", "up", "join-token"))
    assert "upgrade" in server_environment.run("mooring", "db", "--help")


def test_an_upgrade_from_before_the_client_leaves_its_script(
    server_environment: Environment, wheels: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    with zipfile.ZipFile(old / "mooring-0.0.1-py3-none-any.whl", "w") as wheel:
        for name, content in OLD_WHEEL.items():
            wheel.writestr(name, content)
    server_environment.install(old, "mooring")
    assert server_environment.run("mooring") == "the old script\n"
    server_environment.install(wheels, "--upgrade", "mooring")
    assert server_environment.run("mooring", "version") == f"{mooring_client.__version__}\n"
