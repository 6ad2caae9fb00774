"""Attaching to the main process of real containers: from its first byte on, and without ending it."""

from contextlib import closing

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.docker.streams import main_process
from mooring.agent.runtime import Container, ContainerStream
from mooring.schemas.agent_streams import AttachRequest, WindowSize
from mooring_client.stream_messages import Channel
from tests.agent.container_streams import Ran, logs, opened, read_all, refusal, within
from tests.agent.docker.test_exec_streams import until
from tests.agent.docker_assignments import assignment, runtime_on, start
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024


def state_of(runtime: DockerRuntime, container: Container) -> str:
    return next(
        each.status for each in runtime.containers()[0] if each.container_id == container.container_id
    )


def attached(runtime: DockerRuntime, container: Container, *given: bytes, end: bool = True) -> Ran:
    """Attach, send this input, and read to the end."""

    async def attach() -> Ran:
        async with opened(runtime.attach(container.container_id, AttachRequest(stdin=True))) as stream:
            for each in given:
                await stream.write(each)
            if end:
                await stream.end_input()
            return await read_all(stream)

    return within(attach())


def test_a_process_that_ended_at_once_has_its_output_and_exit_code(runtime: DockerRuntime) -> None:
    command = ["sh", "-c", "printf one; printf two >&2; exit 7"]
    container = start(runtime, assignment(command=command, attach=True))
    wait_until(lambda: state_of(runtime, container) == "exited", 10)
    ran = attached(runtime, container)
    assert (ran.stdout, ran.stderr, ran.status.exit_code) == (b"one", b"two", 7)
    assert refusal(lambda: attached(runtime, container)) == "not_running"


def test_the_end_of_the_input_ends_the_process(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(command=["sh", "-c", "cat; exit 3"], stdin=True))
    ran = attached(runtime, container, b"one\xff\0", b"two")
    assert (ran.stdout, ran.status.exit_code) == (b"one\xff\0two", 3)


def test_a_client_that_disconnects_ends_neither_the_process_nor_its_input(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(command=["cat"], stdin=True))

    async def attach_and_leave() -> None:
        async with opened(runtime.attach(container.container_id, AttachRequest(stdin=True))) as stream:
            await stream.write(b"one\n")
            await until(stream, "one")

    within(attach_and_leave())
    ran = attached(runtime, container, b"two\n")
    assert (ran.stdout, ran.status.exit_code) == (b"two\n", 0)


def test_a_terminal_has_its_first_output_a_size_and_a_log(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(command=["sh"], tty=True, stdin=True))
    window = WindowSize(width=101, height=33)

    async def attach() -> tuple[str, Ran]:
        request = AttachRequest(stdin=True, window=window)
        async with opened(runtime.attach(container.container_id, request)) as stream:
            prompt = await until(stream, r"/ # ")
            await stream.write(b"stty size; exit 5\n")
            return prompt, await read_all(stream)

    _prompt, ran = within(attach())
    assert b"33 101" in ran.stdout
    assert ran.status.exit_code == 5
    assert any("33 101" in line for _channel, line in logs(runtime, container.container_id).lines)


def test_a_signal_reaches_the_process(runtime: DockerRuntime) -> None:
    command = ["sh", "-c", "trap 'echo hit; exit 4' INT; echo up; while :; do sleep 0.05; done"]
    container = start(runtime, assignment(command=command, attach=True))

    async def attach() -> Ran:
        async with opened(runtime.attach(container.container_id, AttachRequest())) as stream:
            await until(stream, "up")
            await stream.signal("INT")
            return await read_all(stream)

    ran = within(attach())
    assert (ran.stdout, ran.status.exit_code) == (b"hit\n", 4)


def test_a_process_waits_for_its_reader_and_loses_nothing(runtime: DockerRuntime) -> None:
    command = ["sh", "-c", f"head -c {16 * MIB} /dev/zero; echo done >&2"]
    container = start(runtime, assignment(command=command, attach=True))
    ran = attached(runtime, container)
    assert (len(ran.stdout), ran.stderr) == (16 * MIB, b"done\n")


def test_a_process_does_not_wait_for_a_client_that_never_comes(
    runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_process, "HELD_S", 0.3)
    command = ["sh", "-c", f"head -c {4 * MIB} /dev/zero"]
    container = start(runtime, assignment(command=command, attach=True))
    wait_until(lambda: state_of(runtime, container) == "exited", 10)
    assert refusal(lambda: attached(runtime, container)) == "not_running"


def test_a_later_client_gets_what_is_written_from_then_on(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(command=["sh"], tty=True, stdin=True))

    async def twice() -> Ran:
        first: ContainerStream
        async with opened(runtime.attach(container.container_id, AttachRequest())) as first:
            await until(first, "#")
            async with opened(runtime.attach(container.container_id, AttachRequest(stdin=True))) as second:
                await second.write(b"echo $((40 + 2)); exit\n")
                await until(first, "42")
                return await read_all(second)

    ran = within(twice())
    assert b"42" in ran.stdout
    assert {channel for channel, _data in ran.messages} == {Channel.STDOUT}


def test_an_agent_process_that_did_not_start_the_container_attaches(
    runtime: DockerRuntime, node: DockerNode
) -> None:
    container = start(runtime, assignment(command=["sh"], tty=True, stdin=True))
    with closing(runtime_on(node)) as successor:
        ran = attached(successor, container, b"echo $((40 + 2)); exit 6\n", end=False)
    assert b"42" in ran.stdout
    assert ran.status.exit_code == 6
