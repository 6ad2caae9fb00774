"""`mooring top`: tables, JSON, keys, and a server that is away."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pexpect
import pytest
import yaml

from mooring_client import Mooring
from tests.client.command_line import CommandLine, Tenant
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.nodes import SimulatedNode, WireNode
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

FAST = ("top", "-n", "0.5")
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def cli(shared: RunningService, mooring: Mooring, tmp_path: Path) -> CommandLine:
    return CommandLine(shared.url, tmp_path)


@pytest.fixture
def train(mooring: Mooring, admin: Client) -> str:
    """The ID of a running instance with two GPUs, whose samples have arrived."""
    made = mooring.instances.create(IMAGE, name="train", gpus=2, command=["sleep", "1000"])
    mooring.instances.wait(made.id, timeout_s=20)
    wait_until(lambda: len(admin.get(f"/v1/instances/{made.id}/metrics").json()["items"]) == 2, 20)
    return made.id


@pytest.fixture
def wire(admin: Client) -> Iterator[WireNode]:
    """A node with one GPU, which reports only what the test says."""
    made = WireNode(admin, f"a-{uuid4().hex[:8]}", gpus=1)
    made.sync()
    yield made
    made.close()
    admin.delete(f"/v1/nodes/{made.id}", params={"force": True})


def gpu_lines(lines: list[str]) -> list[str]:
    return lines[1 : lines.index("")]


def closed(terminal: "pexpect.spawn[bytes]") -> int | None:
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus


def test_without_a_terminal_it_prints_once(cli: CommandLine, train: str, node: SimulatedNode) -> None:
    lines = cli("top").lines
    assert re.split(" {2,}", lines[0]) == [
        "NODE", "GPU", "MODEL", "UTIL", "MEMORY", "POWER", "TEMP", "USED BY",
    ]  # fmt: skip
    rows = [re.split(" {2,}", line) for line in gpu_lines(lines)]
    assert [row[:2] for row in rows] == [["gpu-1", str(index)] for index in range(8)]
    assert [row[-1] for row in rows].count("train") == 2
    for row in rows:
        assert re.fullmatch(r"\d+%", row[3]), row
        assert re.fullmatch(r"[0-9.]+ of [0-9.]+ GiB", row[4]), row
        assert re.fullmatch(r"\d+ W", row[5]), row
        assert re.fullmatch(r"\d+ C", row[6]), row
    instances = lines[lines.index("") + 1 :]
    assert instances[0].split() == ["INSTANCE", "NODE", "GPUS", "UTIL", "RUNS", "IMAGE"]
    assert re.fullmatch(rf"train +gpu-1 +2 +\d+% +\d+s +{IMAGE}", instances[1])


def test_json_and_yaml_are_one_object_of_what_the_api_has(
    cli: CommandLine, train: str, admin: Client
) -> None:
    found = cli.json("top")
    assert found.keys() == {"gpus", "instances"}
    served = admin.items("/v1/gpus", samples=True)
    assert [gpu.keys() for gpu in found["gpus"]] == [gpu.keys() for gpu in served]
    assert {gpu["sample"]["uuid"] for gpu in found["gpus"]} == {gpu["uuid"] for gpu in served}
    assert found["instances"] == admin.items("/v1/instances", state="running")
    assert yaml.safe_load(cli("top", "-o", "yaml").out).keys() == found.keys()
    assert "'name' is not one of" in cli("top", "-o", "name", code=2).err


def test_what_is_not_reported_is_a_dash_and_never_0(cli: CommandLine, wire: WireNode, admin: Client) -> None:
    (row,) = (line for line in gpu_lines(cli("top").lines) if line.startswith(wire.name))
    assert re.split(" {2,}", row)[3:] == ["-", "- of 79.6 GiB", "-", "-", "-"]
    (gpu,) = admin.items("/v1/gpus", node_id=wire.id)
    sample = {"uuid": gpu["uuid"], "index": 0, "sampled_at": "2026-11-21T08:00:00.000Z", "memory_used_mib": 0}
    wire.heartbeat(samples=[sample])
    (row,) = (line for line in gpu_lines(cli("top").lines) if line.startswith(wire.name))
    assert re.split(" {2,}", row)[3:] == ["-", "0.0 of 79.6 GiB", "-", "-", "-"]


def test_an_empty_cluster_says_so(tmp_path: Path) -> None:
    with running(settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")) as service:
        assert CommandLine(service.url, tmp_path)("top").out == "no GPUs\n\nno instance runs\n"


def test_a_member_sees_no_values_of_other_projects(
    shared: RunningService, admin: Client, train: str, tmp_path: Path
) -> None:
    tenant = Tenant(shared, admin, tmp_path)
    lines = tenant.member("top").lines
    others = [line for line in gpu_lines(lines) if line.endswith("(another project)")]
    assert len(others) == 2
    for line in others:
        assert re.split(" {2,}", line)[3:] == ["-", "- of 79.6 GiB", "-", "-", "(another project)"]
    assert lines[-1] == "no instance runs"


@pytest.mark.parametrize("key", ["q", "Q", "\x03"])
def test_a_key_leaves_with_exit_code_0(cli: CommandLine, train: str, key: str) -> None:
    terminal = cli.terminal(*FAST)
    terminal.expect_exact("GPUs in use: 2 of 8   instances running: 1   q: quit")
    terminal.expect_exact("train")
    terminal.send("x")
    terminal.send(key)
    assert closed(terminal) == 0
    # The screen and the cursor are as before.
    assert terminal.before is not None
    assert b"\x1b[?1049l" in terminal.before
    assert terminal.before.rfind(b"\x1b[?25h") > terminal.before.rfind(b"\x1b[?25l")


def test_it_follows_changes_and_the_size_of_the_terminal(
    cli: CommandLine, train: str, mooring: Mooring
) -> None:
    cli.environment |= {"COLUMNS": "80", "LINES": "24"}  # as some shells export them
    terminal = cli.terminal(*FAST)
    terminal.expect_exact("train")
    mooring.instances.create(IMAGE, name="later", gpus=1)
    terminal.expect_exact("GPUs in use: 3 of 8   instances running: 2")
    terminal.expect_exact("later")
    terminal.setwinsize(12, 40)
    terminal.expect_exact("more GPUs")
    terminal.setwinsize(50, 120)
    terminal.expect_exact(IMAGE)
    terminal.send("q")
    assert closed(terminal) == 0


def test_colors_are_off_with_no_color_and_dumb_terminals(cli: CommandLine, train: str) -> None:
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        terminal: pexpect.spawn[bytes] = pexpect.spawn(
            cli.argv[0],
            [*cli.argv[1:], *FAST],
            env={**cli.environment, "TERM": "xterm", variable: value},
            timeout=20,
            dimensions=(24, 120),
        )
        terminal.expect_exact("INSTANCE")
        seen = bytes(terminal.before or b"")
        terminal.send("q")
        assert closed(terminal) == 0
        assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", seen)
        assert variable == "NO_COLOR" or b"\x1b" not in seen


def _unreachable(times: int) -> list[Any]:
    return [(502, {"Content-Type": "text/html"}, b"<html>Bad Gateway</html>")] * times


def test_while_the_server_is_away_the_last_table_stays(
    shared: RunningService, cli: CommandLine, train: str
) -> None:
    with LossyProxy(shared.url) as proxy:
        cli.environment["MOORING_URL"] = proxy.url
        terminal = cli.terminal(*FAST)
        terminal.setwinsize(24, 160)
        terminal.expect_exact("train")
        proxy.answers = _unreachable(1000)
        terminal.expect(rb"no news since \d\d:\d\d:\d\d \([1-9]\d*s\): .*; trying again")
        terminal.expect_exact("train")
        proxy.answers = _unreachable(1)
        wait_until(lambda: not proxy.answers, 20)
        terminal.expect(rb"\d\d:\d\d:\d\d   GPUs in use: 2 of 8")
        terminal.send("q")
        assert closed(terminal) == 0


def test_an_expired_key_ends_it(
    shared: RunningService, admin: Client, node: SimulatedNode, tmp_path: Path
) -> None:
    made = admin.post("/v1/api-keys", json={"name": "short", "role": "member"}).json()
    terminal = CommandLine(shared.url, tmp_path, made["key"]).terminal(*FAST)
    terminal.expect_exact("GPUs in use")
    assert admin.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    terminal.expect_exact("mooring: ")
    assert closed(terminal) == 4


def test_a_server_that_is_away_at_the_start_is_an_error(cli: CommandLine) -> None:
    cli.environment["MOORING_URL"] = "http://127.0.0.1:9"
    terminal = cli.terminal(*FAST)
    terminal.expect_exact("cannot be reached")
    assert closed(terminal) == 7
