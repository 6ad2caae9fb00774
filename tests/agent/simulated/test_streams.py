"""The streams of simulated containers: a shell with and without a terminal, and an HTTP server."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from mooring.agent.runtime import Container, ContainerStream, RuntimeUnavailable
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent_streams import AttachRequest, DialRequest, ExecRequest, StreamStatus, WindowSize
from mooring_client.stream_messages import Channel
from tests.agent.builders import assignment, pull_and_start
from tests.agent.container_streams import Ran, opened, read_all, refusal, run, within

CLOSED = (Channel.CLOSE, bytes([Channel.STDOUT]))
CTRL_C, CTRL_D = b"\x03", b"\x04"


@pytest.fixture
def runtime() -> SimulatedRuntime:
    return SimulatedRuntime(start_s=0)


@pytest.fixture
def container(runtime: SimulatedRuntime) -> Container:
    started = pull_and_start(runtime, assignment(instance_id="ins_1", command=None))
    assert started is not None
    return started


async def typed(opening: Awaitable[ContainerStream], *keys: bytes) -> Ran:
    """What a stream answers to this input, and its end."""
    async with opened(opening) as stream:
        for each in keys:
            await stream.write(each)
        await stream.end_input()
        return await read_all(stream)


def shell(runtime: SimulatedRuntime, container: Container, *keys: bytes, **more: Any) -> Ran:
    request = ExecRequest(command=["sh"], stdin=True, **more)
    return within(typed(runtime.exec(container.container_id, request), *keys))


@pytest.mark.parametrize(
    ("line", "stdout", "stderr"),
    [
        (b"echo $NAME there", b"value there\n", b""),
        (b"echo oops >&2", b"", b"oops\n"),
        (b"env", b"NAME=value\n", b""),
        (b"pwd", b"/work\n", b""),
        (b"whoami", b"1000\n", b""),
        (b"hostname", b"ins_1\n", b""),
        (b"tty", b"not a tty\n", b""),
        (b"sleep 0.1", b"", b""),
        (b"sleep", b"sleep: usage: sleep SECONDS\n", b""),
        (b"make 'it so", b"simulated: make 'it so\n", b""),
        (b"", b"", b""),
    ],
)
def test_commands_of_a_shell(
    runtime: SimulatedRuntime, container: Container, line: bytes, stdout: bytes, stderr: bytes
) -> None:
    env = {"NAME": "value"}
    ran = shell(runtime, container, line + b"\n", b"exit 4\n", env=env, user="1000", working_dir="/work")
    # Input that comes during a `sleep` is not run.
    exit_code = 0 if line == b"sleep 0.1" else 4
    assert (ran.stdout, ran.stderr, ran.status.exit_code) == (stdout, stderr, exit_code)


def test_a_terminal_echoes_and_joins_both_channels(runtime: SimulatedRuntime, container: Container) -> None:
    ran = shell(runtime, container, b"tty\r", b"ech", b"o x >&2\r", b"partial", CTRL_C, CTRL_D, tty=True)
    assert (ran.stderr, ran.status) == (b"", StreamStatus(exit_code=0))
    assert ran.stdout.splitlines() == [b"$ tty", b"/dev/pts/0", b"$ echo x >&2", b"x", b"$ partial^C", b"$ "]


def test_ctrl_d_ends_the_program_that_reads(runtime: SimulatedRuntime, container: Container) -> None:
    ran = shell(runtime, container, b"cat\r", b"one\r", CTRL_D, b"exit 5\r", tty=True)
    assert ran.stdout.splitlines() == [b"$ cat", b"one", b"one", b"$ exit 5"]
    assert ran.status.exit_code == 5
    assert shell(runtime, container, b"sleep 0.1\r", CTRL_D, tty=True).status.exit_code == 0


def test_the_end_of_the_input_ends_no_terminal(runtime: SimulatedRuntime, container: Container) -> None:
    async def late() -> Ran:
        request = ExecRequest(command=["sleep", "0.1"], tty=True, stdin=True)
        async with opened(runtime.exec(container.container_id, request)) as stream:
            await stream.end_input()
            await stream.signal("TERM")
            return await read_all(stream)

    assert within(late()).status == StreamStatus(exit_code=143)


@pytest.mark.parametrize(("name", "exit_code"), [("HUP", 129), ("INT", 130), ("KILL", 137), ("TERM", 143)])
def test_a_signal_ends_a_command(
    runtime: SimulatedRuntime, container: Container, name: str, exit_code: int
) -> None:
    async def signalled() -> Ran:
        request = ExecRequest(command=["sleep", "1000"])
        async with opened(runtime.exec(container.container_id, request)) as stream:
            await stream.signal("WINCH")
            await stream.signal(name)
            return await read_all(stream)

    assert within(signalled()).status == StreamStatus(exit_code=exit_code)


def test_output_beyond_its_limit_is_dropped(runtime: SimulatedRuntime, container: Container) -> None:
    assert run(runtime, container, "echo", "abc", max_output_bytes=4).status == StreamStatus(exit_code=0)
    ran = run(runtime, container, "echo", "abcdef", max_output_bytes=4)
    assert (ran.stdout, ran.status) == (b"abcd", StreamStatus(exit_code=0, truncated=True))


def test_a_writer_waits_for_the_reader_until_the_stream_is_closed(
    runtime: SimulatedRuntime, container: Container
) -> None:
    async def flood() -> None:
        async with opened(
            runtime.exec(container.container_id, ExecRequest(command=["cat"], stdin=True))
        ) as stream:
            writing = asyncio.ensure_future(write(stream))
            done, _ = await asyncio.wait({writing}, timeout=1)
            assert not done
            await read_to(stream, 200)
            assert not writing.done()
        await writing

    async def write(stream: ContainerStream) -> None:
        for _ in range(400):
            await stream.write(b"x")

    async def read_to(stream: ContainerStream, count: int) -> None:
        for _ in range(count):
            assert await stream.read() == (Channel.STDOUT, b"x")

    within(flood())


def test_an_engine_that_becomes_unavailable_fails_the_reader(
    runtime: SimulatedRuntime, container: Container
) -> None:
    async def read() -> None:
        async with opened(
            runtime.exec(container.container_id, ExecRequest(command=["cat"], stdin=True))
        ) as stream:
            runtime.unavailable = True
            with pytest.raises(RuntimeUnavailable):
                await stream.read()

    within(read())


def http(runtime: SimulatedRuntime, container: Container, *sent: bytes) -> Ran:
    return within(typed(runtime.dial(container.container_id, DialRequest(port=8888)), *sent))


def test_a_port_answers_each_request(runtime: SimulatedRuntime, container: Container) -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbo", b"dy"
    ran = http(runtime, container, get[:9], get[9:] + get, *post)
    assert ran.stdout.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert ran.stdout.count(b"simulated: port 8888 of ins_1\n") == 3
    assert (ran.messages[-1], ran.status) == (CLOSED, StreamStatus())


def test_a_port_answers_a_request_for_headers_only(runtime: SimulatedRuntime, container: Container) -> None:
    ran = http(runtime, container, *2 * [b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"])
    assert ran.stdout.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"simulated" not in ran.stdout


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"nonsense\r\n\r\n", b"400 Bad Request"),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"400 Bad Request"),
    ],
)
def test_a_port_closes_the_connection(
    runtime: SimulatedRuntime, container: Container, sent: bytes, status: bytes
) -> None:
    async def talk() -> Ran:
        async with opened(runtime.dial(container.container_id, DialRequest(port=8888))) as stream:
            await stream.write(sent)
            return await read_all(stream)

    ran = within(talk())
    assert ran.stdout.startswith(b"HTTP/1.1 " + status)
    assert ran.status == StreamStatus()


def test_a_port_needs_a_running_container(runtime: SimulatedRuntime, container: Container) -> None:
    runtime.begin_stop(container)
    assert refusal(lambda: http(runtime, container)) == "not_running"


def started(runtime: SimulatedRuntime, **spec: Any) -> Container:
    made = pull_and_start(runtime, assignment(instance_id="ins_2", **spec))
    assert made is not None
    return made


def attach(runtime: SimulatedRuntime, container: Container, *keys: bytes) -> Ran:
    request = AttachRequest(stdin=True, window=WindowSize(width=99, height=22))
    return within(typed(runtime.attach(container.container_id, request), *keys))


def exit_code_of(runtime: SimulatedRuntime, container: Container) -> int | None:
    return next(
        each.exit_code for each in runtime.containers()[0] if each.container_id == container.container_id
    )


def test_a_shell_as_the_main_process_ends_its_container(runtime: SimulatedRuntime) -> None:
    container = started(runtime, command=["sh"], tty=True, stdin=True)
    ran = attach(runtime, container, b"stty size\nexit 3\n")
    assert b"22 99" in ran.stdout
    assert ran.status.exit_code == 3
    assert exit_code_of(runtime, container) == 3


def test_a_main_process_outlives_its_clients(runtime: SimulatedRuntime) -> None:
    container = started(runtime, command=["sh"], tty=True, stdin=True)

    async def leave() -> None:
        async with opened(runtime.attach(container.container_id, AttachRequest(stdin=True))) as stream:
            await stream.write(b"echo hello\n")

    within(leave())
    assert exit_code_of(runtime, container) is None
    assert attach(runtime, container, b"exit 4\n").status.exit_code == 4


def test_the_end_of_a_main_process_without_input_ends_the_stream(runtime: SimulatedRuntime) -> None:
    container = started(runtime, command=["sh", "-c", "sleep 0.2; exit 6"], attach=True)
    ran = attach(runtime, container)
    assert (ran.stdout, ran.status.exit_code) == (b"simulated: nothing runs here, on 0 GPUs\n", 6)
