"""Logs and exec of real containers, also when the engine stops or the reader closes them."""

import asyncio
import re

import psutil
import pytest

from mooring.agent.docker.client import Engine
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, RuntimeUnavailable
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamStatus
from mooring_client.schemas.text import MAX_LINE_BYTES
from mooring_client.stream_messages import Channel
from tests.agent.container_streams import Ran, logs, opened, read_all, refusal, run, within
from tests.agent.docker_assignments import assignment, processes_in, runtime_on, start, the_ended
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.waiting import wait_until

FOLLOW = LogsRequest(tail=None, since=None, follow=True)
TOUCH = ExecRequest(command=["touch", "/tmp/go"])


def sh(runtime: DockerRuntime, script: str) -> Container:
    return start(runtime, assignment(command=["sh", "-c", script]))


def ended(runtime: DockerRuntime, script: str) -> Container:
    sh(runtime, script)
    return the_ended(runtime)


def test_logs_name_their_stream_and_time_and_end(runtime: DockerRuntime) -> None:
    container = ended(runtime, "echo one; echo two >&2; printf 'three\\033[31m'")
    read = logs(runtime, container.container_id)
    assert sorted(read.lines) == [("stderr", "two"), ("stdout", "one"), ("stdout", "three")]
    # Not compared with `started_at` and `finished_at`, which the engine records independently of the output.
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{9}Z", at) for at in read.times)
    assert read.status == StreamStatus()


def test_tail_and_since(runtime: DockerRuntime) -> None:
    container = ended(runtime, "for i in 1 2 3 4 5; do echo $i; done")
    times = logs(runtime, container.container_id).times
    last_two = [("stdout", "4"), ("stdout", "5")]
    assert logs(runtime, container.container_id, tail=2).lines == last_two
    assert logs(runtime, container.container_id, since=times[3]).lines == last_two


def test_an_invalid_since_is_an_error(runtime: DockerRuntime) -> None:
    container = sh(runtime, "sleep 100")
    assert refusal(lambda: logs(runtime, container.container_id, since="yesterday")) == "bad_since"


def test_a_long_line_is_cut(runtime: DockerRuntime) -> None:
    container = ended(runtime, "head -c 50000 /dev/zero | tr '\\0' x; echo; echo next")
    read = logs(runtime, container.container_id)
    assert [len(text) for _channel, text in read.lines] == [MAX_LINE_BYTES, 4]


def test_a_follow_yields_new_lines_and_ends_with_the_container(runtime: DockerRuntime) -> None:
    container = sh(runtime, "echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo last")

    async def follow() -> Ran:
        async with opened(runtime.logs(container.container_id, FOLLOW)) as stream:
            assert text_of(await stream.read()) == "first"
            async with opened(runtime.exec(container.container_id, TOUCH)) as command:
                assert (await read_all(command)).status.exit_code == 0
            return await read_all(stream)

    rest = within(follow())
    assert (rest.lines, rest.status) == ([("stdout", "last")], StreamStatus())


def test_closing_a_follow_leaves_no_connection(runtime: DockerRuntime) -> None:
    container = sh(runtime, "echo first; sleep 1000")

    async def follow() -> None:
        before = len(connections())
        async with opened(runtime.logs(container.container_id, FOLLOW)) as stream:
            assert text_of(await stream.read()) == "first"
            assert len(connections()) == before + 1
        await asyncio.sleep(0)  # the event loop closes an aborted connection in its next iteration
        assert len(connections()) == before

    within(follow())


def test_logs_of_a_missing_container(runtime: DockerRuntime) -> None:
    assert refusal(lambda: logs(runtime, "nosuch", follow=True)) == "not_found"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_follow_fails_when_the_engine_stops(new_docker_node: NewDockerNode, how: str) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    container = sh(runtime, "echo first; sleep 1000")

    async def follow() -> None:
        async with opened(runtime.logs(container.container_id, FOLLOW)) as stream:
            assert text_of(await stream.read()) == "first"
            await asyncio.to_thread(getattr(node, how))
            with pytest.raises(RuntimeUnavailable):
                await read_all(stream)

    within(follow())
    runtime.close()


def test_exec_shows_both_streams_the_environment_and_the_exit_code(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(env={"GREETING": "héllo"}))
    ran = run(runtime, container, "sh", "-c", "echo $GREETING; echo oops >&2; exit 3")
    assert (ran.stdout.decode(), ran.stderr) == ("héllo\n", b"oops\n")
    assert ran.status == StreamStatus(exit_code=3)


def test_exec_loses_no_output(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    for _ in range(20):
        ran = run(runtime, container, "seq", "2000")
        assert ran.stdout.split() == [b"%d" % number for number in range(1, 2001)]
        assert ran.status.exit_code == 0


def test_exec_of_a_missing_command(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    assert run(runtime, container, "nosuch").status.exit_code in {126, 127}


def test_exec_output_is_cut_and_the_command_runs_to_its_end(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    script = "seq 100000; touch /tmp/done; exit 4"
    ran = run(runtime, container, "sh", "-c", script, max_output_bytes=1000)
    assert len(ran.stdout) == 1000
    assert ran.status == StreamStatus(exit_code=4, truncated=True)
    assert run(runtime, container, "ls", "/tmp/done").status.exit_code == 0


def test_closing_an_exec_kills_it_with_its_children_and_nothing_else(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    script = "echo up; sleep 4444 & sleep 5555"

    async def execute() -> None:
        request = ExecRequest(command=["sh", "-c", script])
        async with opened(runtime.exec(container.container_id, request)) as stream:
            assert await stream.read() == (Channel.STDOUT, b"up\n")
            await asyncio.to_thread(wait_until, lambda: processes_of(container, "5555"))

    within(execute())
    wait_until(lambda: not processes_of(container, "4444") and not processes_of(container, "5555"))
    assert runtime.containers()[0][0].status == "running"


def test_exec_in_a_container_that_does_not_run(runtime: DockerRuntime) -> None:
    container = ended(runtime, "true")
    assert refusal(lambda: run(runtime, container, "true")) == "not_running"
    runtime.remove(container)
    assert refusal(lambda: run(runtime, container, "true")) == "not_running"


def test_exec_fails_when_the_engine_stops(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    container = start(runtime, assignment())

    async def execute() -> None:
        request = ExecRequest(command=["sh", "-c", "echo up; sleep 1000"])
        stream = await runtime.exec(container.container_id, request)
        assert await stream.read() == (Channel.STDOUT, b"up\n")
        await asyncio.to_thread(node.kill)
        with pytest.raises(RuntimeUnavailable):
            await read_all(stream)
        with pytest.raises(RuntimeUnavailable):
            await stream.close()

    within(execute())
    runtime.close()


def test_a_slow_reader_of_much_output_can_close(node: DockerNode) -> None:
    engine = Engine({"DOCKER_HOST": node.url})
    runtime = runtime_on(node)
    container = sh(runtime, "yes")
    stream = engine.stream(
        "GET",
        f"/containers/{container.container_id}/logs",
        params={"stdout": "1", "follow": "1"},
        headers_in_s=5,
    )
    assert stream.read(5)
    stream.close()
    assert stream.read(5) == b""
    engine.close()
    runtime.close()


def processes_of(container: Container, argument: str) -> list[str]:
    """The command lines in the container that have this argument, as the host sees them."""
    return [command for command in processes_in(container) if argument in command.split("\0")]


def text_of(found: tuple[Channel, bytes] | None) -> str:
    """The text of a log line."""
    assert found is not None
    return found[1].partition(b" ")[2].decode()


def connections() -> list[object]:
    """The connections of this process to unix sockets, such as the engine's."""
    return list(psutil.Process().net_connections("unix"))
