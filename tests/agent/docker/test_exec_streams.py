"""Commands with an input in real containers: terminal, signals, half-close, much data, and slow programs."""

import asyncio
import hashlib
import os
import re
from contextlib import AbstractAsyncContextManager

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, ContainerStream, StreamRefused
from mooring.schemas.agent_streams import ExecRequest, WindowSize
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel
from tests.agent.container_streams import opened, read_all, refusal, run, with_late_input, within
from tests.agent.docker_assignments import assignment, processes_in, start
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024


async def until(stream: ContainerStream, wanted: str) -> str:
    """Read until the output matches this pattern."""
    output = ""
    while not re.search(wanted, output):
        found = await stream.read()
        assert found is not None, output
        output += found[1].decode()
    return output


def execution(
    runtime: DockerRuntime, container: Container, *command: str, **more: object
) -> AbstractAsyncContextManager[ContainerStream]:
    request = ExecRequest.model_validate({"command": command, "stdin": True, **more})
    return opened(runtime.exec(container.container_id, request))


def test_the_end_of_the_input_ends_the_program(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> None:
        async with execution(runtime, container, "cat") as stream:
            await stream.write(b"one\xff\0")
            assert await stream.read() == (Channel.STDOUT, b"one\xff\0")
            await stream.end_input()
            ran = await read_all(stream)
        assert (ran.stdout, ran.status.exit_code) == (b"", 0)

    within(execute())


def test_a_terminal_shows_output_after_the_end_of_the_input(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> None:
        script = "read line; sleep 1; echo late"
        async with execution(runtime, container, "sh", "-c", script, tty=True) as stream:
            await stream.write(b"x\n")
            await stream.end_input()
            ran = await read_all(stream)
        assert ran.stdout.endswith(b"late\r\n")
        assert ran.status.exit_code == 0

    within(execute())


def test_much_data_passes_in_both_directions_at_once(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    sent = os.urandom(16 * MIB)

    async def execute() -> bytes:
        async with execution(runtime, container, "cat") as stream:

            async def write() -> None:
                for at in range(0, len(sent), MAX_DATA_BYTES):
                    await stream.write(sent[at : at + MAX_DATA_BYTES])
                await stream.end_input()

            writing = asyncio.ensure_future(write())
            ran = await read_all(stream)
            await writing
            assert max(len(data) for _channel, data in ran.messages) <= MAX_DATA_BYTES
            return ran.stdout

    received = within(execute())
    assert hashlib.sha256(received).digest() == hashlib.sha256(sent).digest()


def test_a_terminal_has_the_size_of_the_window_and_follows_it(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    window = WindowSize(width=101, height=41)
    script = "echo begun; read line; stty size; read line; stty size; echo $line; exec sleep 1000"

    async def execute() -> None:
        async with execution(runtime, container, "sh", "-c", script, tty=True, window=window) as stream:
            await until(stream, "begun")
            await stream.write(b"\r")
            await until(stream, r"41 101\r\n")
            await stream.resize(WindowSize(width=120, height=50))
            await stream.write(b"typed\r")
            await until(stream, r"typed\r\n50 120\r\ntyped\r\n")
            await asyncio.to_thread(wait_until, lambda: commands_in(container, "1000"))
            await stream.write(b"\x03")
            assert (await read_all(stream)).status.exit_code == 130

    within(execute())


def test_a_signal_reaches_the_command_and_its_children(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    script = "trap 'echo caught; exit 5' INT; echo ready; sleep 1000 & wait"

    async def execute() -> None:
        async with execution(runtime, container, "sh", "-c", script) as stream:
            await until(stream, "ready")
            await stream.signal("NONSENSE")
            await stream.signal("INT")
            ran = await read_all(stream)
            assert (ran.stdout, ran.status.exit_code) == (b"caught\n", 5)

    within(execute())
    assert runtime.containers()[0][0].status == "running"


def test_environment_user_and_folder_of_the_request(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(env={"GREETING": "hello"}))
    script = "echo $GREETING $MORE; id -u; id -g; pwd"
    ran = run(
        runtime, container, "sh", "-c", script, env={"MORE": "x=y"}, user="1000:100", working_dir="/tmp"
    )
    assert ran.stdout.decode().split() == ["hello", "x=y", "1000", "100", "/tmp"]


def test_an_unknown_user_is_refused(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    try:
        ran = run(runtime, container, "true", user="nosuch")
    except StreamRefused as refused:  # by newer engines
        assert refused.status.reason is not None
        assert refused.status.reason.code == "exec_rejected"
    else:
        assert (ran.status.exit_code, b"unable to find user" in ran.stdout) == (126, True)


def test_a_folder_in_a_file_system_of_the_kernel_is_refused(runtime: DockerRuntime) -> None:
    """A program in /proc may get a directory of the host as its own (CVE-2024-21626)."""
    container = start(runtime, assignment())
    for path in ("/proc/self/fd/8", "/proc/1/cwd", "//tmp/..//proc/self", "/sys", "/dev/fd/8"):
        code = refusal(lambda path=path: run(runtime, container, "pwd", working_dir=path))  # type: ignore[misc]
        assert code == "exec_rejected"


def test_a_program_that_reads_nothing_makes_its_writer_wait_and_can_be_killed(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> int:
        written = 0
        async with execution(runtime, container, "sleep", "7777") as stream:
            try:
                async with asyncio.timeout(2):
                    while True:
                        await stream.write(bytes(MAX_DATA_BYTES))
                        written += MAX_DATA_BYTES
            except TimeoutError:
                return written

    assert within(execute()) < 16 * MIB
    wait_until(lambda: not commands_in(container, "7777"))


def test_data_after_the_end_of_the_input_is_dropped(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> bytes:
        async with execution(runtime, container, "cat") as stream:
            return (await with_late_input(stream)).stdout

    assert within(execute()) == b"one"


def test_a_command_that_has_ended_takes_input_signals_and_sizes(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> None:
        async with execution(runtime, container, "true", tty=True) as stream:
            assert (await read_all(stream)).status.exit_code == 0
            await stream.write(b"late")
            await stream.resize(WindowSize(width=80, height=24))
            await stream.signal("TERM")
            await stream.end_input()

    within(execute())


def test_a_command_ends_with_its_container(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> None:
        async with execution(runtime, container, "cat") as stream:
            await stream.write(b"one")
            assert await stream.read() == (Channel.STDOUT, b"one")
            await asyncio.to_thread(runtime.kill, container)
            ran = await read_all(stream)
            assert (ran.messages, ran.status.exit_code) == ([], 137)
            await stream.write(b"late")

    within(execute())


def test_a_command_ends_when_its_container_is_removed(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())

    async def execute() -> None:
        request = ExecRequest(command=["sh", "-c", "echo up; sleep 6666"])
        async with opened(runtime.exec(container.container_id, request)) as stream:
            assert await stream.read() == (Channel.STDOUT, b"up\n")
            await asyncio.to_thread(runtime.kill, container)
            await asyncio.to_thread(runtime.remove, container)
            assert await stream.read() is None
            reason = (await stream.status()).reason
            assert reason is not None
            assert reason.code == "not_running"

    within(execute())
    assert not commands_in(container, "6666")


def commands_in(container: Container, argument: str) -> list[str]:
    """The command lines in the container that have this argument."""
    return [each for each in processes_in(container) if argument in each.split("\0")]
