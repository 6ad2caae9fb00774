"""The `mooring` command against a service with a simulated node: output, exit codes and configuration."""

import json
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooring_client import Mooring
from mooring_client.cli.main import sections
from mooring_client.schemas.instances import Instance
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.service import ADMIN_KEY, Client, RunningService
from tests.walk.cli_client import WITHIN_S, CliClient


@pytest.fixture
def cli(shared: RunningService, mooring: Mooring, tmp_path: Path) -> CliClient:
    return CliClient(shared.url, tmp_path)


@pytest.fixture
def running(mooring: Mooring) -> str:
    """The name of a running instance with a GPU."""
    made = mooring.instances.create(IMAGE, name="train", gpus=1, ports=[8888], command=["sleep", "1000"])
    return mooring.instances.wait(made.id, timeout_s=20).name


def _named(mooring: Mooring, name: str) -> Instance:
    return next(iter(mooring.instances.list(name=name)))


def _json(cli: CliClient, *arguments: str) -> Any:
    done = cli.run(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- lists


def test_ps_shows_what_has_not_ended(cli: CliClient, running: str, mooring: Mooring) -> None:
    mooring.instances.create(IMAGE, name="waits", gpus=64)
    ended = mooring.instances.create(IMAGE, name="ended")
    mooring.instances.stop(ended.id)
    mooring.instances.wait(ended.id, "stopped", timeout_s=20)
    lines = cli.run("ps").stdout.decode().splitlines()
    assert lines[0].split() == ["NAME", "STATE", "GPUS", "NODE", "AGE", "DETAIL"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert set(rows) == {"train", "waits"}
    assert rows["train"].split()[:4] == ["train", "running", "1", "gpu-1"]
    assert "#1 in the queue: " in rows["waits"]
    assert cli.run("ps", "-o", "name").stdout.split() == [b"waits", b"train"]
    assert b"ended" in cli.run("ps", "-a", "-o", "name").stdout.split()


def test_json_and_yaml_are_the_objects_of_the_api(cli: CliClient, running: str, admin: Client) -> None:
    served = admin.items("/v1/instances", name=running)
    assert _json(cli, "ps") == served
    assert yaml.safe_load(cli.run("ps", "-o", "yaml").stdout) == served
    me = admin.get("/v1/me").json()
    assert _json(cli, "whoami") == me
    assert _json(cli, "gpus") == admin.items("/v1/instance-types")


def test_an_empty_list_says_so_on_stderr(cli: CliClient) -> None:
    done = cli.run("ps")
    assert (done.stdout, done.returncode) == (b"", 0)
    assert done.stderr == b"no instances; `mooring run IMAGE` starts one\n"
    assert _json(cli, "ps") == []
    assert cli.run("queue").stderr == b"nothing waits\n"


def test_a_list_into_a_pipe_that_closes_is_no_failure(cli: CliClient, mooring: Mooring) -> None:
    for number in range(3):
        mooring.instances.create(IMAGE, name=f"waits-{number}", gpus=64)
    with cli.start("ps", "-o", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_ps_watches_changes_without_missing_one(cli: CliClient, running: str, mooring: Mooring) -> None:
    with cli.start("ps", "-w", "-o", "name") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"train\n"
        mooring.instances.create(IMAGE, name="later", gpus=1)
        assert process.stdout.readline() == b"later\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_gpus_and_queue(cli: CliClient, running: str, mooring: Mooring) -> None:
    mooring.instances.create(IMAGE, name="waits", gpus=64)
    table = cli.run("gpus").stdout.decode().splitlines()
    assert table[0].startswith("TYPE")
    assert "7 of 8" in table[1]
    assert cli.run("queue").stdout.decode().splitlines()[1].split()[:3] == ["1", "waits", "64"]


# --- single instances


def test_detached_run_prints_the_id(cli: CliClient, mooring: Mooring) -> None:
    done = cli.run(
        "run", "-d", "--name", "job", "--gpus", "2", "--model", "H100", "-e", "A=1", "-e", "FROM_HERE",
        "--label", "team=vision", "--max-duration", "8h", "--memory", "2g", IMAGE, "--", "sleep", "5",
    )  # fmt: skip
    assert done.returncode == 2
    assert b"FROM_HERE is not set here" in done.stderr
    done = cli.run(
        "run", "-d", "--name", "job", "--gpus", "2", "--model", "H100", "-e", "A=1", "--label", "team=vision",
        "--max-duration", "8h", "--memory", "2g", IMAGE, "--", "sleep", "5",
    )  # fmt: skip
    made = _named(mooring, "job")
    assert (done.stdout, done.returncode) == (f"{made.id}\n".encode(), 0)
    assert cli.run("ps", "-q").stdout.decode().split() == [made.id]
    assert (made.command, made.gpus.count, made.gpus.model) == (["sleep", "5"], 2, "H100")
    assert (made.env, made.labels, made.max_duration_s) == ({"A": "1"}, {"team": "vision"}, 28_800)
    assert made.memory_mib == 2048


def test_commands_on_instances_name_what_they_changed(cli: CliClient, running: str) -> None:
    assert cli.run("stop", running, "-t", "1").stdout == b"train\n"
    assert cli.run("wait", running, "--for", "stopped").returncode == 0
    assert cli.run("start", running).stdout == b"train\n"
    assert cli.run("wait", running, "--for", "running").returncode == 0
    assert cli.run("restart", running).stdout == b"train\n"
    assert cli.run("wait", running, "--for", "running").returncode == 0
    done = cli.run("rm", "--wait", running, "no-such-one")
    assert (done.stdout, done.returncode) == (b"train\n", 3)
    assert b"there is no instance 'no-such-one'; `mooring ps -a` lists all" in done.stderr
    assert cli.run("ps", "-a").stdout == b""


def test_wait_ends_in_time_and_with_the_exit_code(cli: CliClient, running: str, mooring: Mooring) -> None:
    assert cli.run("wait", running, "--timeout", "1").returncode == 124
    mooring.instances.stop(_named(mooring, running).id, timeout_s=1)
    ended = mooring.instances.wait(_named(mooring, running).id, "stopped", 20)
    assert ended.exit_code is not None
    assert cli.run("wait", running).returncode == ended.exit_code


def test_explain_says_why_and_what_would_fit(cli: CliClient, running: str, mooring: Mooring) -> None:
    mooring.instances.create(IMAGE, name="all-eight", gpus=8)
    text = cli.run("explain", "all-eight").stdout.decode()
    assert text.startswith("all-eight is pending: ")
    assert "gpu-1: insufficient_gpus (wanted 8 free GPUs of one model, had 7 free of 8 (1 in use))" in text
    assert "would start now with: 7 GPUs" in text
    assert cli.run("explain", running).stdout == b"train is running\n"


def test_exec_has_the_output_and_exit_code_of_the_command(cli: CliClient, running: str) -> None:
    done = cli.run("exec", running, "--", "echo", "hello")
    assert (done.stdout, done.returncode) == (b"hello\n", 0)


def test_open_prints_a_link_without_a_terminal(cli: CliClient, running: str) -> None:
    link = cli.run("open", running)
    assert (link.returncode, link.stdout.startswith(b"http"), link.stdout.count(b"\n")) == (0, True, 1)


# --- failures


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ps", "-o", "xml"], 2, b"'xml' is not one of"),
        (["no-such-command"], 2, b"No such command"),
        (["logs", "no-such-one"], 3, b"there is no instance 'no-such-one'"),
        (["ps", "--node", "no-such-one"], 3, b"there is no node 'no-such-one'"),
        (["-p", "no-such-one", "ps"], 3, b"there is no project 'no-such-one'"),
        (["run", "--memory", "much", IMAGE], 2, b"'much' is not a size, such as 512m or 16g"),
        (["run", "--no-queue", "--gpus", "64", IMAGE], 5, b""),
    ],
)
def test_failures_have_a_message_and_an_exit_code(
    cli: CliClient, arguments: list[str], code: int, message: bytes
) -> None:
    done = cli.run(*arguments)
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert message in done.stderr


def test_a_bad_key_is_not_allowed(shared: RunningService, tmp_path: Path) -> None:
    done = CliClient(shared.url, tmp_path, key="mrg_wrong").run("ps")
    assert done.returncode == 4
    assert b"(unauthorized, request req_" in done.stderr


def test_without_a_server_or_configuration_it_says_what_to_do(cli: CliClient) -> None:
    cli.environment["MOORING_URL"] = "http://127.0.0.1:9"
    done = cli.run("ps")
    assert done.returncode == 7
    assert b"http://127.0.0.1:9 cannot be reached" in done.stderr
    del cli.environment["MOORING_URL"], cli.environment["MOORING_API_KEY"]
    done = cli.run("ps")
    assert done.returncode == 4
    assert b"mooring login" in done.stderr


def test_an_answer_that_is_lost_is_asked_for_again(
    shared: RunningService, cli: CliClient, running: str
) -> None:
    with LossyProxy(shared.url) as proxy:
        cli.environment["MOORING_URL"] = proxy.url
        proxy.lose = 1
        assert cli.run("ps", "-o", "name").stdout == b"train\n"


# --- configuration


@pytest.fixture
def fresh(cli: CliClient) -> CliClient:
    """A user who has configured nothing."""
    del cli.environment["MOORING_URL"], cli.environment["MOORING_API_KEY"]
    return cli


def test_login_saves_a_private_context(shared: RunningService, fresh: CliClient, tmp_path: Path) -> None:
    done = fresh.run("login", shared.url, "--name", "lab", given=f"{ADMIN_KEY}\n".encode())
    assert done.returncode == 0, done.stderr
    assert ADMIN_KEY.encode() not in done.stdout + done.stderr
    file = tmp_path / "mooring" / "config.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert _json(fresh, "whoami")["is_admin"]
    assert _json(fresh, "--context", "lab", "whoami")["is_admin"]
    unknown = fresh.run("--context", "none", "whoami")
    assert unknown.returncode == 2
    assert b"lab" in unknown.stderr


def test_login_does_not_save_a_key_that_does_not_work(
    shared: RunningService, fresh: CliClient, tmp_path: Path
) -> None:
    assert fresh.run("login", shared.url, given=b"mrg_wrong\n").returncode == 4
    assert fresh.run("login", shared.url, given=b"\n").returncode == 4
    assert fresh.run("login", shared.url, "--url", shared.url, given=b"k\n").returncode == 2
    assert not (tmp_path / "mooring" / "config.toml").exists()


def test_login_asks_for_the_key_in_a_terminal_without_showing_it(
    shared: RunningService, fresh: CliClient
) -> None:
    terminal = fresh.terminal("login", shared.url)
    terminal.expect_exact(f"API key for {shared.url}")
    terminal.waitnoecho()
    terminal.sendline(ADMIN_KEY)
    terminal.expect_exact("logged in to")
    assert ADMIN_KEY.encode() not in (terminal.before or b"")
    terminal.wait()


def test_docker_context_writes_a_private_configuration(cli: CliClient, tmp_path: Path) -> None:
    done = cli.run("docker-context", str(tmp_path / "docker"))
    if done.returncode == 0:
        file = tmp_path / "docker" / "config.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert f"DOCKER_CONFIG={tmp_path / 'docker'}".encode() in done.stdout
    else:
        assert b"docker" in done.stderr.lower()


# --- completion


@pytest.fixture
def bash(cli: CliClient) -> Iterator[CliClient]:
    cli.environment |= {"_MOORING_COMPLETE": "complete_bash"}
    yield cli


def _completed(cli: CliClient, line: str) -> list[str]:
    cli.environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return cli.run().stdout.decode().split()


def test_commands_options_and_names_are_completed(bash: CliClient, running: str) -> None:
    assert _completed(bash, "mooring ex") == ["exec", "explain"]
    assert "--gpus" in _completed(bash, "mooring run --g")
    assert _completed(bash, "mooring logs tr") == ["train"]


def test_completion_without_a_server_is_empty_and_quick(bash: CliClient) -> None:
    bash.environment["MOORING_URL"] = "http://127.0.0.1:9"
    assert _completed(bash, "mooring logs tr") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_completes_with_mooring(cli: CliClient, shell: str) -> None:
    script = cli.run("completion", shell).stdout
    assert b"_MOORING_COMPLETE" in script


def test_help_lists_every_command_and_each_has_its_own(cli: CliClient) -> None:
    text = cli.run("--help").stdout.decode()
    for section in sections():
        assert f"{section.title}:" in text
        for name, command in section.commands.items():
            assert (f"  {name} " in text) is not command.hidden


def test_logs_are_followed_until_the_container_ends(cli: CliClient, running: str) -> None:
    with cli.start("logs", "-f", running) as process:
        cli.run("stop", running, "-t", "0")
        process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
