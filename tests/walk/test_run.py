"""`mooring run`, attached to real containers: output, exit code, Ctrl-C, and a server that restarts."""

import signal
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.service import Client
from tests.testbed.registry import Registry
from tests.testbed.waiting import wait_until
from tests.walk.cli_client import WITHIN_S, CliClient
from tests.walk.conftest import Cluster
from tests.walk.test_operations import WAITER

IMAGE = "mooring-test/busybox:1"
SMALL = ("--cpus", "0.1", "--memory", "64m")
# Prints each line that it reads, and `end` at SIGTERM.
READY = "echo ready; trap 'echo end; exit 7' TERM; while :; do sleep 0.05; done"


@pytest.fixture
def cli(cluster: Cluster, tmp_path: Path) -> CliClient:
    return CliClient(cluster.server.url, tmp_path)


def _instance(admin: Client, name: str) -> dict[str, Any]:
    return admin.items("/v1/instances", name=name)[0]


def test_the_output_and_the_exit_code_are_those_of_the_program(cli: CliClient) -> None:
    done = cli.run("run", *SMALL, IMAGE, "--", "sh", "-c", "echo out; echo bad >&2; printf last; exit 3")
    assert (done.stdout, done.returncode) == (b"out\nlast", 3)
    assert done.stderr.endswith(b"bad\n")


def test_input_is_passed_on_and_its_end_too(cli: CliClient) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    done = cli.run("run", "-i", "--rm", "--name", "copies", *SMALL, IMAGE, "--", "cat", given=lines)
    assert (done.stdout == lines, done.returncode) == (True, 0), done.stderr


def test_rm_deletes_the_instance_after_its_end(cli: CliClient, admin: Client) -> None:
    assert cli.run("run", "--rm", "--name", "short", *SMALL, IMAGE, "--", "true").returncode == 0
    wait_until(lambda: not admin.items("/v1/instances", name="short"), WITHIN_S, 0.05)


def test_the_first_ctrl_c_stops_the_program(cli: CliClient, admin: Client) -> None:
    terminal = cli.terminal("run", "--name", "train", *SMALL, IMAGE, "--", "sh", "-c", READY)
    terminal.expect_exact("ready\r\n")
    terminal.sendintr()
    terminal.expect_exact("stopping train; Ctrl-C again leaves it running")
    terminal.expect_exact("end\r\n")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 7
    assert admin.wait(_instance(admin, "train")["id"], "stopped")["exit_code"] == 7


def test_the_second_ctrl_c_detaches(cli: CliClient, admin: Client) -> None:
    ignoring = "echo ready; trap '' TERM; while :; do sleep 0.05; done"
    terminal = cli.terminal("run", "--name", "train", *SMALL, IMAGE, "--", "sh", "-c", ignoring)
    terminal.expect_exact("ready\r\n")
    terminal.sendintr()
    terminal.expect_exact("leaves it running")
    terminal.sendintr()
    terminal.expect_exact("detached; train goes on: `mooring logs -f train`")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130


def test_a_closed_terminal_leaves_the_program_running(cli: CliClient, admin: Client) -> None:
    terminal = cli.terminal("run", "--name", "train", *SMALL, IMAGE, "--", "sh", "-c", READY)
    terminal.expect_exact("ready\r\n")
    terminal.close(force=False)  # SIGHUP
    wait_until(lambda: not terminal.isalive(), WITHIN_S, 0.05)
    assert _instance(admin, "train")["state"] == "running"
    done = cli.run("logs", "train")
    assert done.stdout == b"ready\n"


def test_a_terminal_is_the_programs_with_its_size_and_keys(cli: CliClient) -> None:
    terminal = cli.terminal("run", "-it", "--rm", *SMALL, IMAGE, "--", "sh")
    terminal.expect_exact("# ")
    terminal.sendline("stty size")
    terminal.expect_exact("24 80\r\n")
    terminal.setwinsize(40, 100)
    terminal.sendline("sleep 0.2; stty size")
    terminal.expect_exact("40 100\r\n")
    terminal.sendline("echo start''ed; sleep 1000")
    terminal.expect_exact("started\r\n")
    terminal.sendintr()  # ends the sleep, not the shell
    terminal.sendline("exit 4")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 4


def test_while_pending_it_says_why_and_ctrl_c_gives_up(cli: CliClient, admin: Client) -> None:
    terminal = cli.terminal("run", "--name", "big", "--gpus", "64", IMAGE, "--", "true")
    terminal.expect_exact("big is pending, #1 in the queue: ")
    terminal.sendintr()
    terminal.expect_exact("stopping big")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert _instance(admin, "big")["state"] == "stopped"


def test_without_a_terminal_progress_is_one_line_for_each_change(cli: CliClient) -> None:
    with cli.start("run", "--name", "big", "--gpus", "64", IMAGE, "--", "true") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(b"big is pending, #1 in the queue: ")
        process.send_signal(signal.SIGINT)
        out, more = process.communicate(timeout=WITHIN_S)
    assert (out, process.returncode) == (b"", 130)
    assert b"\x1b" not in line + more
    assert b"\r" not in line + more


def test_an_image_that_cannot_be_had_is_the_reason_of_the_failure(cli: CliClient, registry: Registry) -> None:
    done = cli.run("run", "--name", "none", *SMALL, f"{registry.name}/nobody/nothing:1", "--", "true")
    assert done.returncode == 1
    assert b"none failed before it ran: " in done.stderr


def test_a_program_that_cannot_be_found_has_the_engines_message(cli: CliClient) -> None:
    done = cli.run("run", "--name", "typo", *SMALL, IMAGE, "--", "no-such-program")
    assert done.returncode in {1, 127}
    assert b"no-such-program" in done.stderr


def test_a_server_that_restarts_does_not_end_the_command(
    cli: CliClient, cluster: Cluster, admin: Client
) -> None:
    command = ("sh", "-c", f"echo ready; exec {WAITER}")
    with cli.start("run", "--name", "long", *SMALL, IMAGE, "--", *command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        cluster.server.kill()
        cluster.server.start()
        cluster.ready()
        admin.post(f"/v1/instances/{_instance(admin, 'long')['id']}/stop", json={"timeout_s": 5})
        _out, messages = process.communicate(timeout=WITHIN_S)
    assert b"continuing from the logs" in messages
    assert process.returncode == _instance(admin, "long")["exit_code"]
