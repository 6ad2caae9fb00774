"""Logs and exec of real containers, also when the engine stops or the reader closes them."""

import re
import threading
from collections.abc import Iterable

import pytest

from mooring.agent.docker.client import Engine
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, RuntimeUnavailable
from mooring.core.text import MAX_LINE_BYTES
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamFrame
from tests.agent.docker_assignments import assignment, processes_in, runtime_on, start, the_ended
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.waiting import wait_until

ALL = LogsRequest(tail=None, since=None, follow=False)
FOLLOW = LogsRequest(tail=None, since=None, follow=True)


def sh(runtime: DockerRuntime, script: str) -> Container:
    return start(runtime, assignment(command=["sh", "-c", script]))


def ended(runtime: DockerRuntime, script: str) -> Container:
    sh(runtime, script)
    return the_ended(runtime)


def lines(frames: Iterable[StreamFrame]) -> list[tuple[str | None, str | None]]:
    return [(frame.stream, frame.text) for frame in frames if frame.stream]


def errors(frames: Iterable[StreamFrame]) -> list[str]:
    return [frame.error.code for frame in frames if frame.error]


def run(
    runtime: DockerRuntime, container: Container, *command: str, timeout_s: int = 10, limit: int = 100_000
) -> list[StreamFrame]:
    request = ExecRequest(command=list(command), timeout_s=timeout_s, max_output_bytes=limit)
    return [frame for frame in runtime.exec(container.container_id, request) if frame != StreamFrame()]


def test_logs_name_their_stream_and_time_and_end(runtime: DockerRuntime) -> None:
    container = ended(runtime, "echo one; echo two >&2; printf 'three\\033[31m'")
    *frames, last = runtime.logs(container.container_id, ALL)
    assert sorted(lines(frames)) == [("stderr", "two"), ("stdout", "one"), ("stdout", "three")]
    # Not compared with `started_at` and `finished_at`, which the engine records independently of the output.
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{9}Z", frame.at or "") for frame in frames)
    assert last == StreamFrame(end=True)


def test_tail_and_since(runtime: DockerRuntime) -> None:
    container = ended(runtime, "for i in 1 2 3 4 5; do echo $i; done")
    *frames, _ = runtime.logs(container.container_id, ALL)
    tail = runtime.logs(container.container_id, LogsRequest(tail=2, since=None, follow=False))
    assert lines(tail) == [("stdout", "4"), ("stdout", "5")]
    since = runtime.logs(container.container_id, LogsRequest(tail=None, since=frames[3].at, follow=False))
    assert lines(since) == [("stdout", "4"), ("stdout", "5")]


def test_an_invalid_since_is_an_error(runtime: DockerRuntime) -> None:
    container = sh(runtime, "sleep 100")
    request = LogsRequest(tail=None, since="yesterday", follow=False)
    assert errors(runtime.logs(container.container_id, request)) == ["bad_since"]


def test_a_long_line_is_cut(runtime: DockerRuntime) -> None:
    container = ended(runtime, "head -c 50000 /dev/zero | tr '\\0' x; echo; echo next")
    *frames, _ = runtime.logs(container.container_id, ALL)
    assert [(len(frame.text or ""), frame.truncated) for frame in frames] == [
        (MAX_LINE_BYTES, True),
        (4, False),
    ]


def test_a_follow_yields_new_lines_and_ends_with_the_container(runtime: DockerRuntime) -> None:
    container = sh(runtime, "echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo last")
    frames = runtime.logs(container.container_id, FOLLOW)
    assert next(frames).text == "first"
    run(runtime, container, "touch", "/tmp/go")
    assert [(frame.text, frame.end) for frame in frames] == [("last", False), (None, True)]


def test_closing_a_follow_ends_it_at_once(runtime: DockerRuntime) -> None:
    container = sh(runtime, "echo first; sleep 1000")
    frames = runtime.logs(container.container_id, FOLLOW)
    assert next(frames).text == "first"
    frames.close()
    wait_until(lambda: not any(thread.name == "docker-stream" for thread in threading.enumerate()))


def test_logs_of_a_missing_container(runtime: DockerRuntime) -> None:
    assert errors(runtime.logs("nosuch", FOLLOW)) == ["not_found"]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_follow_fails_when_the_engine_stops(new_docker_node: NewDockerNode, how: str) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    container = sh(runtime, "echo first; sleep 1000")
    frames = runtime.logs(container.container_id, FOLLOW)
    assert next(frames).text == "first"
    getattr(node, how)()
    with pytest.raises(RuntimeUnavailable):
        list(frames)
    runtime.close()


def test_exec_shows_both_streams_the_environment_and_the_exit_code(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment(env={"GREETING": "héllo"}))
    *output, last = run(runtime, container, "sh", "-c", "echo $GREETING; echo oops >&2; exit 3")
    assert sorted(lines(output)) == [("stderr", "oops\n"), ("stdout", "héllo\n")]
    assert last == StreamFrame(exit_code=3)


def test_exec_loses_no_output(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    for _ in range(20):
        frames = run(runtime, container, "seq", "2000")
        assert "".join(frame.text or "" for frame in frames).split() == [str(n) for n in range(1, 2001)]
        assert frames[-1].exit_code == 0


def test_exec_of_a_missing_command(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    assert run(runtime, container, "nosuch")[-1].exit_code in {126, 127}


def test_exec_output_is_cut_and_the_command_runs_to_its_end(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    frames = run(runtime, container, "sh", "-c", "seq 100000; touch /tmp/done; exit 4", limit=1000)
    assert len("".join(frame.text or "" for frame in frames)) == 1000
    assert [frame.truncated for frame in frames if frame.truncated] == [True]
    assert frames[-1].exit_code == 4
    assert run(runtime, container, "ls", "/tmp/done")[-1].exit_code == 0


def test_exec_that_takes_too_long_is_killed_with_its_children(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    *_, last = run(runtime, container, "sh", "-c", "sleep 4444 & sleep 5555", timeout_s=1)
    assert errors([last]) == ["exec_timeout"]
    wait_until(lambda: not processes_of(container, "4444") and not processes_of(container, "5555"))
    assert runtime.containers()[0][0].status == "running"


def test_closing_the_reader_of_an_exec_kills_it(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    request = ExecRequest(command=["sh", "-c", "echo up; sleep 6666"], timeout_s=100, max_output_bytes=100)
    frames = runtime.exec(container.container_id, request)
    assert next(frames).text == "up\n"
    wait_until(lambda: processes_of(container, "6666"))
    frames.close()
    wait_until(lambda: not processes_of(container, "6666"))


def test_exec_in_a_container_that_does_not_run(runtime: DockerRuntime) -> None:
    container = ended(runtime, "true")
    assert errors(run(runtime, container, "true")) == ["not_running"]
    runtime.remove(container)
    assert errors(run(runtime, container, "true")) == ["not_running"]


def test_exec_fails_when_the_engine_stops(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    container = start(runtime, assignment())
    request = ExecRequest(command=["sh", "-c", "echo up; sleep 1000"], timeout_s=100, max_output_bytes=100)
    frames = runtime.exec(container.container_id, request)
    assert next(frames).text == "up\n"
    node.kill()
    with pytest.raises(RuntimeUnavailable):
        list(frames)
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
