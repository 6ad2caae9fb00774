"""`mooring apply` and `mooring diff` against a service with a simulated node."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring_client import Mooring
from tests.client.command_line import CommandLine
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

# The instance comes before its project, so that the order must be found.
LAB = f"""\
kind: instance
name: train
project: lab
image: {IMAGE}
gpus: {{count: 64}}
env:
  EPOCHS: "10"
---
kind: project
name: lab
quotas: {{instances: 20}}
members:
  - {{email: ada@lab.example, role: owner}}
---
kind: instance_group
name: gang
project: lab
count: 2
template:
  image: {IMAGE}
  gpus: {{count: 64}}
---
kind: reservation
name: course
project: lab
gpus: {{count: 1}}
from: 2099-01-01T08:00:00Z
to: 2099-01-01T18:00:00Z
"""
RESOURCES = ("project/lab", "reservation/course", "instance/train", "instance_group/gang")
BOMB = "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\n"


@pytest.fixture
def cli(shared: RunningService, mooring: Mooring, tmp_path: Path) -> CommandLine:
    return CommandLine(shared.url, tmp_path)


@pytest.fixture
def lab(admin: Client, mooring: Mooring, tmp_path: Path) -> Iterator[str]:
    """The path of a file with a project and resources in it, which are deleted after the test."""
    if not admin.items("/v1/users", email="ada@lab.example"):
        admin.post("/v1/users", json={"name": "Ada", "email": "ada@lab.example"})
    file = tmp_path / "lab.yaml"
    file.write_text(LAB)
    yield str(file)
    for project in mooring.projects.list(name="lab"):
        for group in mooring.instance_groups.list(project_id=project.id):
            mooring.instance_groups.delete(group.id)
        for instance in mooring.instances.list(project_id=project.id):
            mooring.instances.delete(instance.id)
        mooring.projects.delete(project.id)


def _instance(name: str, /, **fields: Any) -> str:
    lines = [f"kind: instance\nname: {name}\nimage: {IMAGE}\ngpus: {{count: 64}}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in fields.items())]) + "\n"


def _names(mooring: Mooring) -> set[str]:
    return {each.name for each in mooring.instances.list()}


class TestApply:
    def test_everything_is_created_in_order_and_then_unchanged(
        self, cli: CommandLine, lab: str, mooring: Mooring
    ) -> None:
        assert cli("apply", "-f", lab).lines == [f"{each} created" for each in RESOURCES]
        (project,) = mooring.projects.list(name="lab")
        assert project.quotas.instances == 20
        assert [each.email for each in mooring.projects.members(project.id)] == ["ada@lab.example"]
        (train,) = mooring.instances.list(name="train")
        assert (train.project_id, train.env) == (project.id, {"EPOCHS": "10"})
        for _ in range(2):
            assert cli("apply", "-f", lab).lines == [f"{each} unchanged" for each in RESOURCES]
        (again,) = mooring.instances.list(name="train")
        assert again.id == train.id

    def test_what_differs_is_changed(self, cli: CommandLine, lab: str, mooring: Mooring) -> None:
        cli("apply", "-f", lab)
        text = LAB.replace("instances: 20", "instances: 30").replace("T18:00", "T19:00")
        Path(lab).write_text(text.replace("env:", "priority: 7\nenv:"))
        assert cli("apply", "-f", lab).lines == [
            "project/lab changed", "reservation/course changed", "instance/train changed",
            "instance_group/gang unchanged",
        ]  # fmt: skip
        (train,) = mooring.instances.list(name="train")
        assert train.priority == 7

    def test_files_folders_and_stdin(self, cli: CommandLine, mooring: Mooring, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "b.yml").write_text(_instance("in-b"))
        (folder / "a.yaml").write_text(_instance("in-a"))
        (folder / "notes.txt").write_text("no: resource")
        alone = tmp_path / "alone.yaml"
        alone.write_text(_instance("alone"))
        found = cli("apply", "-f", str(folder), "-f", "-", "-f", str(alone), given=_instance("piped"))
        assert found.lines == [f"instance/{name} created" for name in ("in-a", "in-b", "piped", "alone")]
        assert _names(mooring) == {"in-a", "in-b", "piped", "alone"}

    def test_the_chosen_project_is_the_default(self, cli: CommandLine, lab: str, mooring: Mooring) -> None:
        cli("apply", "-f", lab)
        found = cli("-p", "lab", "apply", "-f", "-", given=_instance("elsewhere"))
        assert found.lines == ["instance/elsewhere created"]
        (project,) = mooring.projects.list(name="lab")
        (made,) = mooring.instances.list(name="elsewhere")
        assert made.project_id == project.id

    def test_a_failure_is_told_and_the_others_are_applied(self, cli: CommandLine, mooring: Mooring) -> None:
        cli("apply", "-f", "-", given=_instance("fixed"))
        text = _instance("fixed", command="[sleep, '1']", env="{A: 'x'}")
        found = cli("apply", "-f", "-", given=f"{text}---\n{_instance('other')}", code=1)
        assert found.lines == [
            "instance/fixed failed: /command, /env/A cannot be changed; --replace deletes it and creates it "
            "again",
            "instance/other created",
        ]
        missing = cli("apply", "-f", "-", given=_instance("nowhere", project="no-such-project"), code=1)
        assert missing.lines == [
            "instance/nowhere failed: there is no project 'no-such-project' that you can see (not_found)"
        ]

    def test_what_the_server_rejects_is_shown_with_its_line(self, cli: CommandLine, lab: str) -> None:
        member = "  - {email: ada@lab.example, role: owner}\n"
        Path(lab).write_text(LAB.replace(member, member + member.replace("owner", "viewer")))
        found = cli("apply", "-f", lab, code=1)
        assert found.lines[0] == (f"project/lab failed: {lab}:14: the user ada@lab.example is listed twice")

    def test_an_ended_instance_is_not_run_again(self, cli: CommandLine, mooring: Mooring) -> None:
        text = _instance("done").replace("count: 64", "count: 1")
        cli("apply", "-f", "-", given=text)
        (made,) = mooring.instances.list(name="done")
        mooring.instances.wait(made.id, timeout_s=20)
        mooring.instances.stop(made.id, timeout_s=1)
        mooring.instances.wait(made.id, "stopped", timeout_s=20)
        assert cli("apply", "-f", "-", given=text).lines == ["instance/done unchanged"]
        assert mooring.instances.get(made.id).state == "stopped"


class TestReplace:
    @pytest.fixture
    def running(self, cli: CommandLine, mooring: Mooring) -> str:
        """The ID of a running instance that was applied."""
        cli("apply", "-f", "-", given=_instance("swap").replace("count: 64", "count: 1"))
        (made,) = mooring.instances.list(name="swap")
        return mooring.instances.wait(made.id, timeout_s=20).id

    DIFFERENT = _instance("swap", command="[sleep, '9']", env="{TOKEN: hunter2}").replace(": 64", ": 1")

    def test_it_is_deleted_and_created_again(self, cli: CommandLine, mooring: Mooring, running: str) -> None:
        found = cli("apply", "--replace", "--yes", "-f", "-", given=self.DIFFERENT)
        assert found.lines == ["instance/swap replaced"]
        assert '  /command: null -> ["sleep","9"] (fixed: needs a new one)' in found.err.splitlines()
        assert "/env/TOKEN: differs (values of env are not shown)" in found.err
        assert "hunter2" not in found.err + found.out
        (made,) = mooring.instances.list(name="swap")
        assert (made.id != running, made.command) == (True, ["sleep", "9"])
        again = cli("apply", "--replace", "--yes", "-f", "-", given=self.DIFFERENT)
        assert again.lines == ["instance/swap unchanged"]

    def test_a_group_is_replaced_too(self, cli: CommandLine, lab: str, mooring: Mooring) -> None:
        cli("apply", "-f", lab)
        Path(lab).write_text(LAB.replace("count: 2\n", "count: 3\n"))
        assert cli("apply", "--replace", "-y", "-f", lab).lines[-1] == "instance_group/gang replaced"
        (gang,) = mooring.instance_groups.list(name="gang")
        assert gang.count == 3

    def test_without_a_terminal_it_needs_yes(self, cli: CommandLine, mooring: Mooring, running: str) -> None:
        found = cli("apply", "--replace", "-f", "-", given=self.DIFFERENT, code=2)
        assert "add --yes" in found.err
        assert mooring.instances.get(running).state == "running"

    @pytest.mark.parametrize("agrees", [True, False])
    def test_on_a_terminal_it_asks(
        self, cli: CommandLine, mooring: Mooring, running: str, tmp_path: Path, agrees: bool
    ) -> None:
        (tmp_path / "swap.yaml").write_text(self.DIFFERENT)
        with cli.terminal("apply", "--replace", "-f", str(tmp_path / "swap.yaml")) as terminal:
            terminal.expect("/command: null -> ")
            terminal.expect("delete instance/swap and create it again")
            assert mooring.instances.get(running).state == "running"
            terminal.sendline("y" if agrees else "n")
            terminal.expect("instance/swap replaced" if agrees else "failed: it was not replaced")
            terminal.expect(b"\r\n")
            terminal.wait()
        assert terminal.exitstatus == (0 if agrees else 1)
        (made,) = mooring.instances.list(name="swap")
        assert (made.id == running) is not agrees

    def test_one_that_is_being_deleted_is_waited_for(
        self, cli: CommandLine, mooring: Mooring, running: str
    ) -> None:
        mooring.instances.delete(running)
        found = cli("apply", "-f", "-", given=self.DIFFERENT)
        assert found.lines == ["instance/swap created"]


class TestDryRun:
    def test_it_says_what_would_be_done_and_does_nothing(
        self, cli: CommandLine, lab: str, mooring: Mooring
    ) -> None:
        planned = [f"{each} would be created" for each in RESOURCES]
        assert cli("apply", "--dry-run", "-f", lab).lines == planned
        assert list(mooring.projects.list(name="lab")) == []
        cli("apply", "-f", lab)
        assert cli("apply", "--dry-run", "-f", lab).lines == [f"{each} unchanged" for each in RESOURCES]
        Path(lab).write_text(LAB.replace("env:", "priority: 7\nenv:").replace("count: 2", "count: 3"))
        found = cli("apply", "--dry-run", "-f", lab, code=1)
        assert found.lines[2:] == [
            "instance/train would be changed",
            "instance_group/gang failed: /count cannot be changed; --replace deletes it and creates it again",
        ]
        found = cli("apply", "--dry-run", "--replace", "-f", lab)
        assert found.lines[3] == "instance_group/gang would be replaced"
        (train,) = mooring.instances.list(name="train")
        assert train.priority == 50

    def test_it_finds_what_apply_would(self, cli: CommandLine, lab: str) -> None:
        cli("apply", "-f", lab)
        text = _instance("too-many", project="lab").replace("count: 64", "count: 1")
        Path(lab).write_text(LAB.replace("instances: 20", "instances: 3"))
        cli("apply", "-f", lab)
        for arguments in (("--dry-run",), ()):
            found = cli("apply", *arguments, "-f", "-", given=text, code=1)
            assert found.lines[0].startswith("instance/too-many failed: ")
            assert found.lines[0].endswith("(quota_exceeded)")


class TestDiff:
    def test_it_shows_each_field_and_ends_like_diff(self, cli: CommandLine, lab: str) -> None:
        found = cli("diff", "-f", lab, code=1)
        assert found.lines[:3] == [
            "project/lab would be created",
            '  /quotas: (none) -> {"instances": 20}',
            '  /members: (none) -> [{"email": "ada@lab.example", "role": "owner"}]',
        ]
        assert '  /env: (none) -> {"EPOCHS": "..."}' in found.lines
        cli("apply", "-f", lab)
        assert cli("diff", "-f", lab).out == ""
        text = LAB.replace("instances: 20", "gpus: 8").replace('"10"', '"hunter2"').replace("T18", "T19")
        Path(lab).write_text(text.replace("env:", "labels: {team: vision}\nenv:"))
        assert cli("diff", "-f", lab, code=1).lines == [
            "project/lab would be changed",
            "  /quotas/gpus: null -> 8",
            "  /quotas/instances: 20 -> null",
            "reservation/course would be changed",
            '  /to: "2099-01-01T18:00:00.000Z" -> "2099-01-01T19:00:00.000Z"',
            "instance/train cannot be changed, only replaced",
            '  /labels/team: (none) -> "vision"',
            "  /env/EPOCHS: differs (values of env are not shown) (fixed: needs a new one)",
        ]
        cli("apply", "-f", lab, code=1)
        assert "instance/train" in cli("diff", "-f", lab, code=1).out

    def test_trouble_is_not_taken_for_a_difference(self, cli: CommandLine, tmp_path: Path) -> None:
        cli("diff", "-f", str(tmp_path / "missing.yaml"), code=2)
        found = cli("diff", "-f", "-", given=_instance("a", project="no-such-project"), code=3)
        assert found.lines == [
            "instance/a failed: there is no project 'no-such-project' that you can see (not_found)"
        ]
        away = CommandLine("http://127.0.0.1:9", tmp_path)
        found = away("diff", "-f", "-", given=_instance("a"), code=7)
        assert "cannot be reached" in found.out + found.err


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (BOMB, "stdin:1: anchors (&) and aliases (*) are not supported; write the value out"),
            ("x" * (1024 * 1024 + 1), "stdin is larger than 1024 KiB"),
            (_instance("a", name="b"), "stdin:5: name is given twice, first in line 2"),
            (_instance("a", memory="1"), "stdin:5: unknown field memory in instance"),
            ("kind: pod\nname: a\n", "stdin:1: unknown kind 'pod'; it is one of: "),
            ("", "there is no resource in these files"),
            ("a: [", "stdin:"),
        ],
        ids=["bomb", "large", "twice", "field", "kind", "empty", "yaml"],
    )
    def test_a_bad_file_keeps_everything_from_being_applied(
        self, cli: CommandLine, mooring: Mooring, tmp_path: Path, text: str, problem: str
    ) -> None:
        good = tmp_path / "good.yaml"
        good.write_text(_instance("good"))
        arguments = ("-f", "-") if not text else ("-f", str(good), "-f", "-")
        for command in ("apply", "diff"):
            found = cli(command, *arguments, given=text, code=2)
            assert found.out == ""
            assert found.err.splitlines()[0].startswith(f"mooring: {problem}")
        assert _names(mooring) == set()

    def test_missing_files_and_empty_folders_are_named(self, cli: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        found = cli("apply", "-f", str(tmp_path / "none.yaml"), "-f", str(tmp_path / "empty"), code=2)
        assert "No such file or directory" in found.err
        assert "the folder has no .yaml or .yml file" in found.err

    def test_all_problems_of_all_files_are_shown(self, cli: CommandLine, tmp_path: Path) -> None:
        for number in range(30):
            (tmp_path / f"{number:02}.yaml").write_text("kind: instance\nname: a\n")
        lines = cli("apply", "-f", str(tmp_path), code=2).err.splitlines()
        assert lines[0] == f"mooring: {tmp_path}/00.yaml:1: `image` is missing"
        assert lines[-1] == "mooring: and 10 more"

    def test_variables_are_not_substituted(self, cli: CommandLine, mooring: Mooring) -> None:
        cli("apply", "-f", "-", given=_instance("literal", env="{WHERE: '${HOME}'}"))
        (made,) = mooring.instances.list(name="literal")
        assert made.env == {"WHERE": "${HOME}"}
        assert "are not substituted" in cli("apply", "--help").out

    def test_no_name_changes_what_a_terminal_shows(self, cli: CommandLine) -> None:
        found = cli("apply", "-f", "-", given='kind: instance\nname: a\nimage: x\n"\\e[2Jx": 1', code=2)
        assert "\x1b" not in found.err


class TestFaults:
    def test_two_applies_at_once_create_everything_once(
        self, cli: CommandLine, lab: str, mooring: Mooring
    ) -> None:
        processes = [cli.start("apply", "-f", lab) for _ in range(2)]
        outputs = [process.communicate(timeout=60)[0].decode() for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        lines = sorted(line for output in outputs for line in output.splitlines())
        expected = [f"{each} {outcome}" for each in RESOURCES for outcome in ("created", "unchanged")]
        assert lines == sorted(expected)
        assert len(list(mooring.projects.list(name="lab"))) == 1

    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
    def test_interrupted_in_the_middle_it_can_be_repeated(
        self, cli: CommandLine, lab: str, shared: RunningService, tmp_path: Path, sent: signal.Signals
    ) -> None:
        with LossyProxy(shared.url) as proxy:
            process = CommandLine(proxy.url, tmp_path).start("apply", "-f", lab)

            def interrupt() -> None:
                if _puts(proxy) == 2:  # before the third is carried out
                    os.kill(process.pid, sent)
                    process.wait(20)

            proxy.on_request = interrupt
            process.communicate(timeout=30)
        assert process.returncode == (-sent if sent == signal.SIGKILL else 130)
        outcomes = [line.split()[1] for line in cli("apply", "-f", lab).lines]
        assert outcomes[:2] == ["unchanged", "unchanged"]
        assert outcomes[3] == "created"
        assert cli("apply", "-f", lab).lines == [f"{each} unchanged" for each in RESOURCES]

    def test_interrupted_while_replacing_it_can_be_repeated(
        self, cli: CommandLine, shared: RunningService, mooring: Mooring, tmp_path: Path
    ) -> None:
        cli("apply", "-f", "-", given=_instance("swap"))
        text = _instance("swap", command="[sleep, '9']")
        with LossyProxy(shared.url) as proxy:
            broken = CommandLine(proxy.url, tmp_path)
            (tmp_path / "swap.yaml").write_text(text)
            process = broken.start("apply", "--replace", "--yes", "-f", str(tmp_path / "swap.yaml"))

            def interrupt() -> None:
                if any(method == "DELETE" for method, _path, _key in proxy.seen):
                    process.kill()
                    process.wait(20)

            proxy.on_request = interrupt
            process.communicate(timeout=30)
        wait_until(lambda: _names(mooring) == set() or _names(mooring) == {"swap"})
        assert cli("apply", "-f", "-", given=text).lines[0] in {
            "instance/swap created", "instance/swap unchanged",
        }  # fmt: skip
        (made,) = mooring.instances.list(name="swap")
        assert made.command == ["sleep", "9"]

    def test_a_lost_answer_is_made_up_for(
        self, cli: CommandLine, shared: RunningService, mooring: Mooring, tmp_path: Path
    ) -> None:
        with LossyProxy(shared.url) as proxy:
            proxy.lose = 1
            found = CommandLine(proxy.url, tmp_path)("apply", "-f", "-", given=_instance("lossy"))
        assert found.lines == ["instance/lossy unchanged"]
        assert len(list(mooring.instances.list(name="lossy"))) == 1

    def test_a_key_that_expires_meanwhile_ends_it(
        self, cli: CommandLine, shared: RunningService, tmp_path: Path
    ) -> None:
        text = "---\n".join(_instance(name) for name in ("one", "two", "three"))
        with LossyProxy(shared.url) as proxy:

            def expire() -> None:
                if _puts(proxy) == 1:
                    proxy.answers.append(_unauthorized())

            proxy.on_request = expire
            found = CommandLine(proxy.url, tmp_path)("apply", "-f", "-", given=text, code=4)
        assert found.lines == [
            "instance/one created",
            "instance/two failed: the key is expired (unauthorized)",
        ]
        assert "1 more were not tried" in found.err

    def test_a_server_that_is_away_ends_it(self, tmp_path: Path) -> None:
        text = f"{_instance('one')}---\n{_instance('two')}"
        found = CommandLine("http://127.0.0.1:9", tmp_path)("apply", "-f", "-", given=text, code=7)
        assert "cannot be reached" in found.out + found.err


def _puts(proxy: LossyProxy) -> int:
    return sum(method == "PUT" for method, _path, _key in proxy.seen)


def _unauthorized() -> tuple[int, dict[str, str], bytes]:
    body = (
        b'{"type":"urn:mooring:error:unauthorized","title":"Authentication required","status":401,'
        b'"detail":"the key is expired","instance":null,"code":"unauthorized","request_id":"req_1",'
        b'"retryable":false}'
    )
    return 401, {"Content-Type": "application/problem+json"}, body


def test_apply_is_listed_with_the_instances(cli: CommandLine) -> None:
    lines = cli("--help").lines
    assert any(line.split()[:1] == ["apply"] for line in lines)
    assert any(line.split()[:1] == ["diff"] for line in lines)
