"""`mooring nodes`: what an admin relies on every day."""

import shlex
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from pexpect import EOF

from mooring.core.gpu import GpuFacts
from tests.client.command_line import CommandLine
from tests.nodes import SimulatedNode, WireNode
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

LIVE_FIELDS = {"last_heartbeat_at", "storage", "disk_mib_free", "disk_mib", "disk_allocatable_mib"}


@pytest.fixture(scope="module")
def cli(shared: RunningService, node: SimulatedNode, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine(shared.url, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def member(
    shared: RunningService, node: SimulatedNode, tmp_path_factory: pytest.TempPathFactory
) -> CommandLine:
    with shared.client as admin:
        key = admin.post("/v1/api-keys", json={"name": "of a member", "role": "member"}).json()["key"]
    return CommandLine(shared.url, tmp_path_factory.mktemp("home"), key)


@pytest.fixture
def wire(admin: Client) -> Iterator[WireNode]:
    """A node of its own for each test, which only reports what the test says."""
    made = WireNode(admin, f"wire-{uuid4().hex[:8]}", gpus=2)
    made.facts = made.facts.model_copy(update={"labels": {"wire": made.name}})
    made.sync()
    yield made
    made.close()
    admin.delete(f"/v1/nodes/{made.id}", params={"force": True})


def _node(admin: Client, name: str) -> dict[str, Any]:
    (found,) = admin.items("/v1/nodes", name=name)
    return found


def _stable(node: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in node.items() if field not in LIVE_FIELDS}


def test_nodes_are_listed_as_the_api_has_them(cli: CommandLine, admin: Client, node: SimulatedNode) -> None:
    listed = cli.json("nodes", "ls")
    assert [_stable(each) for each in listed] == [_stable(each) for each in admin.items("/v1/nodes")]
    table = cli("nodes", "ls").lines
    assert table[0].startswith("NAME")
    assert table[-1].split()[:5] == [node.name, "ready", "8", "of", "8"]
    assert cli("nodes", "ls", "-o", "name").lines[-1] == node.name


def test_a_node_is_shown_by_name_and_by_id(cli: CommandLine, admin: Client, node: SimulatedNode) -> None:
    assert _stable(cli.json("nodes", "show", node.name)) == _stable(_node(admin, node.name))
    assert _stable(cli.json("nodes", "show", node.id)) == _stable(_node(admin, node.name))
    shown = cli("nodes", "show", node.name).lines
    assert shown[0].split() == ["name", node.name]
    assert [line.split()[0] for line in shown[-8:]] == [f"{node.name}:{index}" for index in range(8)]


@pytest.mark.parametrize(
    "command",
    [
        ("nodes", "show", "no-such"),
        ("nodes", "show", "nod_00000000000000000000000000"),
        ("nodes", "cordon", "no-such"),
        ("nodes", "rm", "no-such", "--yes"),
        ("nodes", "gpus", "no-such"),
        ("nodes", "clear", "GPU-no-such"),
        ("nodes", "incidents", "gpu-1:99"),
        ("nodes", "clear", ""),
    ],
)
def test_what_does_not_exist_ends_with_3(cli: CommandLine, command: tuple[str, ...]) -> None:
    found = cli(*command, code=3)
    assert found.out == ""
    assert found.err.startswith("mooring: ")


@pytest.mark.parametrize(
    "command",
    [
        ("join",), ("cordon", "gpu-1"), ("resume", "gpu-1"), ("drain", "gpu-1"), ("rm", "gpu-1", "--yes"),
        ("approve", "gpu-1"), ("reserve", "gpu-1", "--all"), ("renew-credential", "gpu-1"),
        ("clear", "gpu-1:0"),
    ],
)  # fmt: skip
def test_a_member_may_not_manage_nodes(
    member: CommandLine, admin: Client, node: SimulatedNode, command: tuple[str, ...]
) -> None:
    before = _node(admin, node.name)["version"]
    refused = member("nodes", *command, code=4)
    assert (refused.out, "admin rights" in refused.err) == ("", True)
    assert _node(admin, node.name)["version"] == before


def _settings_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the rest of a line for a shell."""
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    return variables, [word for word in words if "=" not in word]


def test_a_machine_joins_with_the_printed_command(cli: CommandLine, shared: RunningService) -> None:
    made = cli("nodes", "join", "gpu-7", "--ttl", "5m")
    settings, command = _settings_of(made.out)
    assert command == ["mooring", "agent"]
    assert settings.keys() == {"MOORING_SERVER_URL", "MOORING_JOIN_TOKEN", "MOORING_NODE_NAME"}
    assert settings["MOORING_JOIN_TOKEN"] not in made.err
    assert "add --server URL" in made.err  # this service listens on loopback
    body = {
        "token": settings["MOORING_JOIN_TOKEN"],
        "node_name": settings["MOORING_NODE_NAME"],
        "hostname": "gpu-7",
    }
    joined = httpx.post(f"{settings['MOORING_SERVER_URL']}/agent/v1/join", json=body)
    assert joined.status_code == 201, joined.text
    assert cli("nodes", "rm", "gpu-7", "--yes").lines == ["gpu-7"]


@pytest.mark.parametrize(
    ("server", "more"),
    [
        ("https://mooring.example/", {"MOORING_SERVER_URL": "https://mooring.example"}),
        (
            "http://10.0.0.1:8700",
            {"MOORING_SERVER_URL": "http://10.0.0.1:8700", "MOORING_INSECURE_HTTP": "true"},
        ),
    ],
)
def test_the_join_command_names_the_servers_url(cli: CommandLine, server: str, more: dict[str, str]) -> None:
    made = cli("nodes", "join", "--server", server)
    settings, _command = _settings_of(made.out)
    assert settings.pop("MOORING_JOIN_TOKEN").startswith("mj_")
    assert settings == more
    assert "--server" not in made.err


def test_a_join_token_as_json(cli: CommandLine) -> None:
    token = cli.json("nodes", "join", "gpu-8")
    assert (token["node_name"], token.keys()) == ("gpu-8", {"id", "token", "node_name", "expires_at"})


def test_nodes_are_cordoned_and_resumed_and_one_failure_does_not_keep_the_others(
    cli: CommandLine, admin: Client, wire: WireNode
) -> None:
    done = cli("nodes", "cordon", "no-such", wire.name, code=3)
    assert done.lines == [wire.name]
    assert "no-such" in done.err
    assert _node(admin, wire.name)["state"] == "cordoned"
    assert cli("nodes", "resume", wire.id).lines == [wire.name]
    assert _node(admin, wire.name)["state"] == "ready"


def test_a_drain_with_a_deadline_needs_yes(cli: CommandLine, admin: Client, wire: WireNode) -> None:
    refused = cli("nodes", "drain", wire.name, "--deadline", "30m", code=2)
    assert refused.out == ""
    assert "--yes" in refused.err
    assert _node(admin, wire.name)["state"] == "ready"
    cli("nodes", "drain", wire.name)  # stops nothing
    drained = _node(admin, wire.name)
    assert (drained["state"], drained["drain_deadline_at"]) == ("draining", None)
    cli("nodes", "drain", wire.name, "--deadline", "30m", "--yes")
    assert _node(admin, wire.name)["drain_deadline_at"] is not None
    shown = cli("nodes", "show", wire.name).out
    assert "stops instances at" in shown


def test_a_node_with_instances_stays_unless_it_is_declared_dead(
    cli: CommandLine, admin: Client, wire: WireNode
) -> None:
    made = admin.create(node_selector={"wire": wire.name}, gpus={"count": 1})
    admin.wait(made["id"], "scheduled")
    refused = cli("nodes", "rm", wire.name, "--yes", code=1)
    assert f"{wire.name} has 1 live instances" in refused.err
    assert "--force" in refused.err
    asked = cli("nodes", "rm", wire.name, "--force", code=2)
    assert "1 instances fail" in asked.err
    assert _node(admin, wire.name)["id"] == wire.id
    assert cli("nodes", "rm", wire.name, "--force", "--yes").lines == [wire.name]
    assert admin.items("/v1/nodes", name=wire.name) == []
    assert admin.wait(made["id"], "failed")["reason"]["code"] == "node_lost"


def _answered(cli: CommandLine, answer: str, *arguments: str) -> int | None:
    """The exit code of a command in a terminal whose question is answered so."""
    process = cli.terminal(*arguments)
    process.expect_exact(b"[y/N]: ")
    process.send(answer)
    process.expect(EOF)
    process.close()
    return process.exitstatus


def test_a_question_on_a_terminal(cli: CommandLine, admin: Client, wire: WireNode) -> None:
    for answer, code in (("n\r", 1), ("\r", 1), ("\x03", 130), ("\x04", 130)):
        assert _answered(cli, answer, "nodes", "rm", wire.name) == code
        assert _node(admin, wire.name)["id"] == wire.id
    assert _answered(cli, "y\r", "nodes", "rm", wire.name) == 0
    assert admin.items("/v1/nodes", name=wire.name) == []


def test_new_facts_are_approved_as_they_were_read(cli: CommandLine, admin: Client, wire: WireNode) -> None:
    assert "nothing to do" in cli("nodes", "approve", wire.name).err
    added = GpuFacts(
        uuid=f"GPU-{wire.name}-9", index=9, model=wire.gpus[0].model, memory_mib=81_559, mig_mode="disabled"
    )
    wire.gpus.append(added)
    wire.sync()
    refused = cli("nodes", "approve", wire.name, code=2)
    assert added.uuid in refused.err
    assert _node(admin, wire.name)["facts_changed"] is not None
    assert added.uuid in cli("nodes", "show", wire.name).out
    assert cli("nodes", "approve", wire.name, "--yes").lines == [wire.name]
    wire.sync()
    found = _node(admin, wire.name)
    assert (found["state"], found["facts_changed"], len(found["gpus"])) == ("ready", None, 3)


def test_facts_that_change_after_the_question_are_not_approved(
    cli: CommandLine, admin: Client, wire: WireNode
) -> None:
    wire.facts = wire.facts.model_copy(update={"cpus": 128})
    wire.sync()
    process = cli.terminal("nodes", "approve", wire.name)
    process.expect_exact(b"[y/N]: ")
    wire.facts = wire.facts.model_copy(update={"cpus": 256})
    wire.sync()
    process.send("y\r")
    process.expect(EOF)
    process.close()
    assert process.exitstatus == 1
    (change,) = _node(admin, wire.name)["facts_changed"]["changes"]
    assert (change["approved"], change["reported"]) == (64, 256)


def test_a_node_is_reserved_for_projects(cli: CommandLine, admin: Client, wire: WireNode) -> None:
    assert cli("nodes", "reserve", wire.name, "default").lines == [wire.name]
    (project,) = admin.items("/v1/projects", name="default")
    assert _node(admin, wire.name)["reserved_for"] == [project["id"]]
    assert any(
        line.split() == ["reserved", "for", "default"] for line in cli("nodes", "show", wire.name).lines
    )
    cli("nodes", "reserve", wire.name, code=2)
    cli("nodes", "reserve", wire.name, "default", "--all", code=2)
    cli("nodes", "reserve", wire.name, "--all")
    assert _node(admin, wire.name)["reserved_for"] is None


def test_quarantined_gpus_are_listed_explained_and_cleared(
    cli: CommandLine, admin: Client, wire: WireNode
) -> None:
    gpu = wire.gpus[1].uuid
    fault = {"id": "xid_79/1", "uuid": gpu, "code": "xid_79", "message": "it fell off the bus"}
    wire.sync(incidents=[fault])
    assert cli("nodes", "gpus", wire.name, "--health", "quarantined", "-o", "name").lines == [gpu]
    (listed,) = cli.json("nodes", "gpus", wire.name, "--health", "quarantined")
    assert listed == admin.get(f"/v1/gpus/{gpu}").json()
    row = cli("nodes", "gpus", wire.name).lines[2].split()
    assert (row[0], "quarantined" in row) == (f"{wire.name}:1", True)
    (line,) = (line for line in cli("nodes", "ls").lines if line.startswith(wire.name))
    assert "1 of 2, 1 quarantined" in line
    incidents = cli.json("nodes", "incidents", f"{wire.name}:1")
    assert incidents == admin.items(f"/v1/gpus/{gpu}/incidents")
    assert "xid_79" in cli("nodes", "incidents", gpu).lines[1]
    assert cli("nodes", "clear", f"{wire.name}:1").lines == [gpu]
    assert cli("nodes", "gpus", wire.name, "--health", "quarantined", "-o", "name").lines == []


def test_a_node_replaces_its_credential(cli: CommandLine, admin: Client, node: SimulatedNode) -> None:
    assert cli("nodes", "renew-credential", node.name).lines == [node.name]

    def renewed() -> bool:
        entries = admin.items("/v1/audit-log", action="node.renew_credential", target_id=node.id)
        return any(entry["actor"]["kind"] == "node" for entry in entries)

    wait_until(renewed, timeout_s=20)


def test_names_of_nodes_are_completed(
    shared: RunningService, node: SimulatedNode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bash = CommandLine(shared.url, tmp_path_factory.mktemp("home"))
    for words in ("nodes show gp", "nodes cordon gp", "nodes gpus gp"):
        bash.environment |= {
            "_MOORING_COMPLETE": "complete_bash", "COMP_WORDS": f"mooring {words}", "COMP_CWORD": "3"
        }  # fmt: skip
        assert bash().lines == [node.name]
