"""`mooring templates` and `mooring run --template`."""

from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from mooring_client import Mooring
from tests.client.command_line import CommandLine, Tenant
from tests.client.conftest import IMAGE
from tests.service import Client, RunningService

FILE = """\
kind: template
name: {name}
parameters:
  gpus: {{type: integer, default: 1}}
  text: {{description: what to print}}
spec:
  image: {image}
  command: [echo, "${{text}}"]
  gpus: {{count: "${{gpus}}"}}
  env: {{A: "1"}}
  ports: [{{container: 8888}}]
"""


@pytest.fixture
def cli(shared: RunningService, mooring: Mooring, tmp_path: Path) -> CommandLine:
    return CommandLine(shared.url, tmp_path)


@pytest.fixture
def template(cli: CommandLine, tmp_path: Path) -> str:
    """The name of a template that was applied from a file."""
    name = f"echo-{uuid4().hex[:8]}"
    (tmp_path / "template.yaml").write_text(FILE.format(name=name, image=IMAGE))
    assert cli("apply", "-f", str(tmp_path / "template.yaml")).out == f"template/{name} created\n"
    return name


def test_templates_are_listed(cli: CommandLine, template: str) -> None:
    lines = {line.split()[0]: line for line in cli("templates", "ls").lines}
    assert {"NAME", "jupyter", "vllm", template} <= lines.keys()
    assert "global" in lines["vllm"]
    assert "model (required)" in lines["vllm"]
    assert "gpus=1, text (required)" in lines[template]


def test_a_shown_template_can_be_applied(cli: CommandLine, template: str, tmp_path: Path) -> None:
    for name in (template, "vllm"):
        shown = cli("templates", "show", name).out
        (tmp_path / "shown.yaml").write_text(shown)
        assert cli("apply", "-f", str(tmp_path / "shown.yaml")).out == f"template/{name} unchanged\n"
    assert yaml.safe_load(shown)["scope"] == "global"
    assert yaml.safe_load(shown)["parameters"]["model"]["example"] == "Qwen/Qwen3-8B"


def test_a_template_runs_with_parameters_and_options(cli: CommandLine, template: str) -> None:
    done = cli(
        "run", "--template", template, "--param", "text=hello world", "-n", "echoes", "-e", "B=2", "-d"
    )
    assert done.out.startswith("ins_")
    (found,) = (each for each in cli.json("ps", "-a") if each["name"] == "echoes")
    assert (found["image"], found["command"]) == (IMAGE, ["echo", "hello world"])
    assert found["gpus"]["count"] == 1
    assert found["env"] == {"A": "1", "B": "2"}
    assert found["labels"] == {"template": template}
    assert [each["container"] for each in found["ports"]] == [8888]


def test_options_and_the_command_replace_those_of_the_template(cli: CommandLine, template: str) -> None:
    options = ("--param", "text=x", "--param", "gpus=4", "--gpus", "2", "--model", "H100", "-n", "own", "-d")
    cli("run", "-T", template, *options, "--", "sleep", "5")
    (found,) = (each for each in cli.json("ps", "-a") if each["name"] == "own")
    assert found["command"] == ["sleep", "5"]
    assert (found["gpus"]["count"], found["gpus"]["model"]) == (2, "H100")


def test_what_a_template_would_run_is_shown(cli: CommandLine, template: str) -> None:
    shown = yaml.safe_load(cli("templates", "render", template, "--param", "text=x").out)
    assert shown["command"] == ["echo", "x"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--param", "gpus=1"), 1, "text must be given"),
        (("--param", "text=x", "--param", "gpus=two"), 2, "gpus must be a number, not 'two'"),
        (("--param", "text=x", "--param", "other=1"), 1, "other there is no such parameter"),
        (("--param", "text"), 2, "'text' is not key=value"),
    ],
)
def test_parameters_that_do_not_fit_are_named(
    cli: CommandLine, template: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert message in cli("run", "--template", template, *arguments, code=code).err


def test_wrong_usage_is_explained(cli: CommandLine) -> None:
    assert "give an IMAGE, or --template NAME" in cli("run", code=2).err
    assert "is for --template" in cli("run", "--param", "a=b", IMAGE, code=2).err
    assert "there is no template 'nosuch'" in cli("run", "--template", "nosuch", code=3).err


def test_the_template_of_the_project_comes_before_a_global_one(
    shared: RunningService, admin: Client, tmp_path: Path
) -> None:
    tenant = Tenant(shared, admin, tmp_path)
    (tmp_path / "own.yaml").write_text(FILE.format(name="jupyter", image=IMAGE))
    assert tenant.member("apply", "-f", str(tmp_path / "own.yaml")).out == "template/jupyter created\n"
    assert f"image: {IMAGE}" in tenant.member("templates", "render", "jupyter", "--param", "text=x").out
    assert tenant.member("templates", "rm", "--yes", "jupyter").out == "jupyter\n"
    assert "image: quay.io/jupyter" in tenant.member("templates", "show", "jupyter").out
    assert "admin rights" in tenant.member("templates", "rm", "--yes", "jupyter", code=4).err
