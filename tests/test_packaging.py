"""The pinned requirements, the Dockerfile and docker-compose.yml agree with the code.

`scripts/try_images.py` builds and starts the images, which takes minutes.
"""

import re
import tomllib
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
        assert Path(package.__file__).is_relative_to(ROOT / "src")


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
