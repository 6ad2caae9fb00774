"""What is shipped beside the code agrees with it: pins, image, composition.

`scripts/try_images.py` really starts them; that takes minutes.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mooring.agent.settings import AgentSettings
from mooring.settings import Settings

ROOT = Path(__file__).parents[1]
PINS = ("requirements.txt", "requirements-build.txt", "requirements-dev.txt")


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9-]+)==([^ ;]+)", (ROOT / name).read_text(), flags=re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", PINS)
def test_every_pin_has_its_hashes_and_names_no_place(name: str) -> None:
    blocks = re.split(r"^(?=\S)", re.sub(r"^#.*\n", "", text(name), flags=re.MULTILINE), flags=re.MULTILINE)
    assert len(blocks) > 2
    for block in filter(None, blocks):
        assert re.match(
            r"[a-z0-9-]+==\S+.* \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+( +# .*\n)*$", block
        ), block
    assert "://" not in text(name)


def test_pins_are_of_what_the_package_asks_for() -> None:
    """After a change of pyproject.toml: `make lock`."""
    asked = tomllib.loads(text("pyproject.toml"))
    project = asked["project"]
    for name, wanted in {
        "requirements.txt": project["dependencies"],
        "requirements-build.txt": asked["build-system"]["requires"],
        "requirements-dev.txt": project["optional-dependencies"]["dev"],
    }.items():
        pinned = pins(name)
        for requirement in map(Requirement, wanted):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_the_three_sets_of_pins_can_stand_in_one_environment() -> None:
    whole = pins("requirements-dev.txt")
    for name in PINS:
        assert pins(name).items() <= whole.items()


def test_the_image_is_built_from_files_that_the_daemon_is_sent() -> None:
    sent = set(re.findall(r"^!(\S+)$", text(".dockerignore"), flags=re.MULTILINE))
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text("Dockerfile"), flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == sent
    assert all((ROOT / source).exists() for source in sources)


def test_the_composition_sets_what_the_program_reads() -> None:
    known = {f"MOORING_{name.upper()}" for name in (Settings.model_fields | AgentSettings.model_fields)}
    known |= {"MOORING_DATABASE_ROLE_PASSWORD"}  # of `mooring db grant`
    used = set(re.findall(r"^ +(MOORING_[A-Z_]+):", text("docker-compose.yml"), flags=re.MULTILINE))
    assert used
    assert used <= known


def test_no_secret_of_the_composition_has_a_default() -> None:
    for name, rest in re.findall(
        r"\$\{(\w*(?:PASSWORD|KEY|TOKEN)\w*)(:?[^}]*)\}", text("docker-compose.yml")
    ):
        assert rest == "" or rest.startswith(":?"), name
