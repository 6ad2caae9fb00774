"""`mooring mcp` with the protocol's own client."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp_types import TextContent

from mooring_client import Mooring
from tests.client.conftest import IMAGE
from tests.service import RunningService
from tests.walk.cli_client import CliClient

Found = TypeVar("Found")


@pytest.fixture
def cli(shared: RunningService, mooring: Mooring, tmp_path: Path) -> CliClient:
    return CliClient(shared.url, tmp_path)


def _session(cli: CliClient, act: Callable[[Client], Awaitable[Found]]) -> Found:
    async def run() -> Found:
        server = StdioServerParameters(command=cli.argv[0], args=[*cli.argv[1:], "mcp"], env=cli.environment)
        async with Client(server) as client:
            return await act(client)

    return anyio.run(run)


async def _call(client: Client, tool: str, **arguments: Any) -> Any:
    done = await client.call_tool(tool, arguments)
    text = done.content[0]
    assert isinstance(text, TextContent)
    assert not done.is_error, text.text
    return text.text if tool == "instance_logs" else json.loads(text.text)


def test_an_agent_runs_explains_and_deletes_an_instance(cli: CliClient, mooring: Mooring) -> None:
    async def act(client: Client) -> None:
        assert (await _call(client, "list_gpu_types"))["items"][0]["available"] == 8
        made = await _call(client, "run_instance", image=IMAGE, name="train", gpus=2, gpu_model="H100")
        assert made["gpus"]["model"] == "H100"
        waited = await _call(client, "wait_for_instance", instance="train", state="running")
        assert (waited["reached"], waited["instance"]["state"]) == (True, "running")
        listed = await _call(client, "list_instances")
        assert [each["name"] for each in listed["items"]] == ["train"]
        done = await _call(client, "run_command", instance="train", command=["echo", "hello"])
        assert (done["stdout"], done["exit_code"]) == ("hello\n", 0)
        assert isinstance(await _call(client, "instance_logs", instance="train"), str)
        big = await _call(client, "run_instance", image=IMAGE, gpus=64)
        assert (await _call(client, "explain_instance", instance=big["id"]))["queue_position"] == 1
        assert (await _call(client, "list_queue"))["items"][0]["name"] == big["name"]
        assert (await _call(client, "stop_instance", instance=big["id"]))["desired_state"] == "stopped"
        assert (await _call(client, "delete_instance", instance="train"))["desired_state"] == "deleted"

    _session(cli, act)


def test_tools_that_end_work_are_marked_and_reads_too(cli: CliClient) -> None:
    async def act(client: Client) -> dict[str, tuple[bool | None, bool | None]]:
        listed = await client.list_tools()
        return {
            tool.name: (tool.annotations.read_only_hint, tool.annotations.destructive_hint)
            for tool in listed.tools
            if tool.annotations is not None
        }

    found = _session(cli, act)
    destructive = {name for name, (_reads, destroys) in found.items() if destroys}
    assert destructive == {"run_command", "stop_instance", "delete_instance"}
    changing = {name for name, (reads, _destroys) in found.items() if not reads}
    assert changing == destructive | {"run_instance"}
    assert len(found) == 11


def test_a_failure_is_an_answer_with_the_servers_sentence(cli: CliClient) -> None:
    async def act(client: Client) -> None:
        for arguments, message in (
            ({"instance": "none"}, "there is no instance 'none'; list_instances lists all"),
            ({"instance": "ins_none"}, "no instance ins_none"),
        ):
            done = await client.call_tool("get_instance", arguments)
            text = done.content[0]
            assert isinstance(text, TextContent)
            assert done.is_error
            assert message in text.text

    _session(cli, act)


def test_a_bad_key_is_reported_by_the_tool(shared: RunningService, tmp_path: Path) -> None:
    async def act(client: Client) -> str:
        done = await client.call_tool("list_instances", {})
        assert done.is_error
        return str(done.content[0])

    assert "key" in _session(CliClient(shared.url, tmp_path, key="mrg_wrong"), act)
