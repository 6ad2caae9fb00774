"""The simulated engine behaves like Docker, with a clock that the test sets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mooring.agent.runtime import Container, RuntimeUnavailable, StartRefused
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent import Assignment
from mooring.schemas.agent_streams import LogsRequest, StreamStatus
from mooring_client.schemas.states import Reason
from tests.agent.builders import assignment, pull_and_start
from tests.agent.container_streams import Ran, logs, opened, read_all, refusal, run, within
from tests.testbed.waiting import wait_until


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runtime(clock: Clock) -> SimulatedRuntime:
    return SimulatedRuntime(start_s=0, clock=clock)


def start(runtime: SimulatedRuntime, assigned: Assignment) -> Container:
    started = pull_and_start(runtime, assigned)
    assert started is not None
    return started


def the_container(runtime: SimulatedRuntime) -> Container:
    """Return the only container on the node."""
    [container], foreign_containers = runtime.containers()
    assert foreign_containers == []
    return container


@pytest.mark.parametrize(
    ("spec", "runs_s", "exit_code"),
    [
        ({"command": ["sleep", "5"]}, 5, 0),
        ({"command": ["true"]}, 0, 0),
        ({"command": ["false"]}, 0, 1),
        ({"command": ["sh", "-c", "exit 3"]}, 0, 3),
        ({"command": ["sh", "-c", "sleep 2; exit 4"]}, 2, 4),
        ({"command": ["5"], "entrypoint": ["sleep"]}, 5, 0),
    ],
)
def test_programs_end_after_their_duration(
    runtime: SimulatedRuntime, clock: Clock, spec: dict[str, Any], runs_s: float, exit_code: int
) -> None:
    assert start(runtime, assignment(**spec)).status == "running"
    clock.now += runs_s * 0.9
    assert the_container(runtime).status == ("running" if runs_s else "exited")
    clock.now += runs_s * 0.1
    ended = the_container(runtime)
    assert (ended.status, ended.exit_code) == ("exited", exit_code)


@pytest.mark.parametrize("command", [None, ["python", "train.py"], ["sh", "-c", "echo hi"]])
def test_other_programs_run_until_stopped_and_stops_may_be_repeated(
    runtime: SimulatedRuntime, clock: Clock, command: list[str] | None
) -> None:
    started = start(runtime, assignment(command=command))
    clock.now += 1e6
    assert the_container(runtime).status == "running"
    assert runtime.begin_stop(started)
    assert the_container(runtime).exit_code == 143
    assert not runtime.begin_stop(started)
    for _ in range(2):
        runtime.remove(started)
        assert runtime.containers() == ([], [])


def test_a_repeated_start_adopts_the_container(runtime: SimulatedRuntime) -> None:
    assigned = assignment()
    assert start(runtime, assigned) == start(runtime, assigned)
    assert the_container(runtime).attempt == 1


def test_a_restart_runs_the_program_again(runtime: SimulatedRuntime, clock: Clock) -> None:
    start(runtime, assignment(command=["sleep", "5"]))
    clock.now += 7
    ended = the_container(runtime)
    runtime.restart(ended)
    again = the_container(runtime)
    assert (again.status, again.exit_code, again.finished_at) == ("running", None, None)
    clock.now += 5
    assert the_container(runtime).finished_at != ended.finished_at


def test_missing_images_are_refused(runtime: SimulatedRuntime) -> None:
    with pytest.raises(StartRefused) as refusal:
        start(runtime, assignment(image="example.com/missing:1"))
    assert refusal.value.reason.code == "image_not_found"
    assert runtime.containers() == ([], [])


def test_a_cancelled_start_leaves_nothing() -> None:
    runtime, cancel = SimulatedRuntime(start_s=60), threading.Event()
    progress: list[Reason] = []
    answers: list[Container | None] = []
    thread = threading.Thread(
        target=lambda: answers.append(pull_and_start(runtime, assignment(), progress.append, cancel.is_set))
    )
    thread.start()
    wait_until(lambda: progress)
    cancel.set()
    thread.join(5)
    assert answers == [None]
    assert [reason.code for reason in progress] == ["pulling_image"]
    assert runtime.containers() == ([], [])


def test_calls_to_an_unavailable_engine_fail(runtime: SimulatedRuntime) -> None:
    started = start(runtime, assignment())
    runtime.unavailable = True
    for call in (runtime.containers, runtime.facts, lambda: runtime.begin_stop(started)):
        with pytest.raises(RuntimeUnavailable):
            call()
    runtime.unavailable = False
    assert the_container(runtime).status == "running"


def test_a_container_uses_its_gpus_while_it_runs(runtime: SimulatedRuntime, clock: Clock) -> None:
    start(runtime, assignment(gpu_uuids=("GPU-0",), command=["sleep", "5"]))
    assert runtime.gpu_users("GPU-0")
    assert not runtime.gpu_users("GPU-1")
    clock.now += 5
    assert not runtime.gpu_users("GPU-0")


@contextmanager
def collected_changes(runtime: SimulatedRuntime) -> Iterator[list[None]]:
    """Collect the changes of a runtime, until the runtime is closed."""
    changes: list[None] = []
    runtime.watch(lambda: changes.append(None), lambda: False)
    try:
        yield changes
    finally:
        runtime.close()


def test_starts_are_changes() -> None:
    runtime = SimulatedRuntime(start_s=0)

    def is_seen_after_a_start() -> bool:
        start(runtime, assignment(command=None))
        return bool(changes)

    with collected_changes(runtime) as changes:
        wait_until(is_seen_after_a_start)


def test_the_end_of_a_program_is_a_change_without_any_call() -> None:
    runtime = SimulatedRuntime(start_s=0)
    start(runtime, assignment(command=["sleep", "0.2"]))
    with collected_changes(runtime) as changes:
        wait_until(lambda: changes)
    assert the_container(runtime).status == "exited"


def test_logs_have_a_line_per_second(runtime: SimulatedRuntime, clock: Clock) -> None:
    started = start(runtime, assignment(command=["sleep", "3"]))
    clock.now += 10
    whole = logs(runtime, started.container_id)
    assert (len(whole.lines), whole.status) == (4, StreamStatus())
    assert logs(runtime, started.container_id, tail=1).messages == whole.messages[-1:]
    assert logs(runtime, started.container_id, since=whole.times[2]).messages == whole.messages[2:]
    assert refusal(lambda: logs(runtime, started.container_id, since="yesterday")) == "bad_since"


def test_followed_logs_end_with_the_container() -> None:
    runtime = SimulatedRuntime(start_s=0)
    started = start(runtime, assignment(command=None))

    async def follow() -> Ran:
        request = LogsRequest(tail=10, since=None, follow=True)
        async with opened(runtime.logs(started.container_id, request)) as stream:
            first = await stream.read()
            assert first is not None
            runtime.begin_stop(started)
            rest = await read_all(stream)
            return Ran([first, *rest.messages], rest.status)

    read = within(follow())
    assert (len(read.lines), read.status) == (1, StreamStatus())


@pytest.mark.parametrize(
    ("command", "text", "exit_code"),
    [
        (["nvidia-smi"], "GPU 0: simulated (UUID: GPU-7)\n", 0),
        (["echo", "a", "b"], "a b\n", 0),
        (["sh", "-c", "echo hi"], "hi\n", 0),
        (["sh", "-c", "exit 3"], "", 3),
        (["false"], "", 1),
    ],
)
def test_exec_returns_output_and_exit_code(
    runtime: SimulatedRuntime, command: list[str], text: str, exit_code: int
) -> None:
    started = start(runtime, assignment(gpu_uuids=("GPU-7",)))
    ran = run(runtime, started, *command)
    assert (ran.stdout.decode(), ran.status.exit_code) == (text, exit_code)


def test_exec_needs_a_running_container(runtime: SimulatedRuntime) -> None:
    started = start(runtime, assignment(command=["true"]))
    assert refusal(lambda: run(runtime, started, "true")) == "not_running"


def test_each_published_port_is_unique(runtime: SimulatedRuntime) -> None:
    ports = [{"container": 80}, {"container": 81, "protocol": "udp"}]
    endpoints = [
        *start(runtime, assignment(ports=ports)).endpoints,
        *start(runtime, assignment(ports=ports)).endpoints,
    ]
    assert len({one.port for one in endpoints}) == 4
