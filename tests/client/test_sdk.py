"""The SDK against a service with a simulated node."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Event

import pytest

from mooring_client import AsyncMooring, Mooring, MooringError
from mooring_client.errors import (
    Gone,
    InvalidTransition,
    NameTaken,
    NotFound,
    PortNotListening,
    PreconditionFailed,
    TooManyRequests,
    Unauthorized,
)
from mooring_client.failures import BadAnswer, ClientFailure, ConnectionFailed, StreamInterrupted, WaitTimeout
from mooring_client.stream_messages import Channel
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.service import ADMIN_KEY, Client, RunningService


@pytest.fixture
def proxy(shared: RunningService) -> Iterator[LossyProxy]:
    with LossyProxy(shared.url) as found:
        yield found


def test_an_instance_from_create_to_delete(mooring: Mooring) -> None:
    created = mooring.instances.create(IMAGE, name="train", gpus=2, ports=[8888], labels={"team": "vision"})
    running = mooring.instances.wait(created.id, timeout_s=20)
    assert (running.state, running.gpus.count, running.node_name) == ("running", 2, "gpu-1")
    assert [port.container for port in running.ports] == [8888]
    changed = mooring.instances.update(created.id, max_duration_s=None, priority=60, version=running.version)
    assert (changed.priority, changed.max_duration_s, changed.labels) == (60, None, {"team": "vision"})
    with pytest.raises(PreconditionFailed):
        mooring.instances.update(created.id, priority=61, version=running.version)
    assert len(mooring.instances.metrics(created.id)) == 2
    assert mooring.instances.explain(created.id).state == "running"
    assert mooring.instances.history(created.id)[0].data["to"] == "pending"
    mooring.instances.stop(created.id, timeout_s=1)
    assert mooring.instances.wait(created.id, "stopped", timeout_s=20).state == "stopped"
    mooring.instances.delete(created.id)
    with suppress(NotFound):
        mooring.instances.wait(created.id, "deleted", timeout_s=20)
    with pytest.raises(NotFound):
        mooring.instances.get(created.id)


def test_lists_fetch_page_after_page(mooring: Mooring) -> None:
    names = [f"page-{number}" for number in range(7)]
    for name in names:
        mooring.instances.create(IMAGE, name=name, gpus=64)
    listed = mooring.instances.list(limit=3)
    assert [each.name for each in listed] == names[::-1]
    assert [len(page) for page in mooring.instances.list(limit=3).pages()] == [3, 3, 1]
    assert [each.name for each in mooring.instances.list(name="page-2")] == ["page-2"]
    assert [each.name for each in mooring.queue.list()] == names


def test_dry_run_creates_nothing(mooring: Mooring) -> None:
    answer = mooring.instances.dry_run(IMAGE, gpus={"count": 9})
    assert not answer.placeable
    assert answer.reason is not None
    assert mooring.instances.list().all() == []


def test_a_wait_that_cannot_succeed_says_why(mooring: Mooring) -> None:
    stuck = mooring.instances.create(IMAGE, name="stuck", gpus=64)
    with pytest.raises(WaitTimeout, match=r"stuck is still pending: .*64"):
        mooring.instances.wait(stuck.id, timeout_s=1)
    mooring.instances.stop(stuck.id)
    with pytest.raises(WaitTimeout, match="stuck is stopped and will not be running"):
        mooring.instances.wait(stuck.id, timeout_s=20)


def test_a_temporary_instance_is_deleted_also_after_an_error(mooring: Mooring) -> None:
    with pytest.raises(RuntimeError), mooring.instances.temporary(IMAGE, name="scratch") as instance:
        assert instance.state == "running"
        raise RuntimeError
    with pytest.raises(NotFound):
        mooring.instances.wait(instance.id, "deleted", timeout_s=20)
        mooring.instances.get(instance.id)


def test_errors_are_raised_as_their_class(mooring: Mooring) -> None:
    mooring.instances.create(IMAGE, name="same")
    with pytest.raises(NameTaken, match="same") as raised:
        mooring.instances.create(IMAGE, name="same")
    assert raised.value.fields == {"name": "same"}
    assert raised.value.request_id is not None
    with pytest.raises(InvalidTransition):
        mooring.instances.start(mooring.instances.list(name="same").all()[0].id)
    with pytest.raises(MooringError) as invalid:
        mooring.instances.create(IMAGE, cpu=4)  # type: ignore[call-arg]
    assert invalid.value.fields["errors"][0]["pointer"] == "/cpu"


@pytest.mark.parametrize("wrong", ["", ".", ".."])
def test_an_id_cannot_be_another_path(mooring: Mooring, wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an ID"):
        mooring.instances.delete(wrong)
    with pytest.raises(NotFound):
        mooring.instances.get("../nodes")


def test_a_repeated_create_makes_one_instance(mooring: Mooring, proxy: LossyProxy) -> None:
    proxy.lose = 2
    with Mooring(proxy.url, ADMIN_KEY) as client:
        created = client.instances.create(IMAGE)
    keys = {key for _method, _path, key in proxy.seen}
    assert len(proxy.seen) == 3
    assert len(keys) == 1
    assert [each.id for each in mooring.instances.list()] == [created.id]


def test_different_creates_have_different_keys(mooring: Mooring, proxy: LossyProxy) -> None:
    with Mooring(proxy.url, ADMIN_KEY) as client:
        client.instances.create(IMAGE)
        client.instances.create(IMAGE)
    assert len({key for _method, _path, key in proxy.seen}) == 2


def test_an_answer_that_stays_away_is_a_failure_that_may_have_taken_effect(
    mooring: Mooring, proxy: LossyProxy
) -> None:
    proxy.lose = 3
    with Mooring(proxy.url, ADMIN_KEY) as client, pytest.raises(ConnectionFailed) as raised:
        client.instances.create(IMAGE)
    assert raised.value.may_have_taken_effect
    assert len(mooring.instances.list().all()) == 1


def test_429_is_retried_after_the_time_that_the_server_asks_for(proxy: LossyProxy) -> None:
    body = b'{"code": "too_many_requests", "status": 429, "detail": "slow down", "retryable": true}'
    proxy.answers = [(429, {"Retry-After": "0"}, body)]
    with Mooring(proxy.url, ADMIN_KEY) as client:
        assert client.service.me().is_admin
        proxy.answers = [(429, {"Retry-After": "3600"}, body)]
        with pytest.raises(TooManyRequests) as raised:
            client.service.me()
    assert raised.value.retry_after_s == 3600
    assert len(proxy.seen) == 3


def test_an_expired_key_is_not_retried(proxy: LossyProxy) -> None:
    with Mooring(proxy.url, "no-such-key") as client, pytest.raises(Unauthorized):
        client.service.me()
    assert len(proxy.seen) == 1


def test_a_server_that_is_away_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Mooring(url, ADMIN_KEY, max_retries=0) as client:
            with pytest.raises(ConnectionFailed, match=f"{url} cannot be reached") as raised:
                client.service.me()
            assert not raised.value.may_have_taken_effect


def test_a_server_that_is_slow_is_given_up(proxy: LossyProxy) -> None:
    answered = Event()
    proxy.on_request = answered.wait
    with (
        Mooring(proxy.url, ADMIN_KEY, timeout_s=0.2, max_retries=0) as client,
        pytest.raises(ConnectionFailed, match="did not answer in time") as raised,
    ):
        client.service.me()
    answered.set()
    assert raised.value.may_have_taken_effect


def test_a_redirect_is_not_followed_with_the_key(proxy: LossyProxy) -> None:
    proxy.answers = [(302, {"Location": "https://evil.example/"}, b"")]
    with Mooring(proxy.url, ADMIN_KEY) as client, pytest.raises(BadAnswer, match="redirects to https://evil"):
        client.service.me()


def test_events_continue_after_a_lost_connection(mooring: Mooring, proxy: LossyProxy) -> None:
    start = mooring.events.page(limit=200).last_seq
    created = mooring.instances.create(IMAGE)
    mooring.instances.wait(created.id, timeout_s=20)
    proxy.cut_after = [100, 700, 300]
    with Mooring(proxy.url, ADMIN_KEY) as client:
        seen = []
        for event in client.events.follow(start):
            seen.append((event.seq, event.data.get("to")))
            if event.data.get("to") == "running":
                break
    assert not proxy.cut_after
    expected = mooring.events.page(after=start, limit=200).items
    assert seen == [(event.seq, event.data.get("to")) for event in expected][: len(seen)]


def test_events_that_are_gone_end_the_following(mooring: Mooring, proxy: LossyProxy) -> None:
    proxy.answers = [(410, {}, b'{"code": "events_expired", "status": 410, "detail": "too old"}')]
    with Mooring(proxy.url, ADMIN_KEY) as client, pytest.raises(Gone):
        next(client.events.follow())


def test_logs_are_followed_until_the_container_ends_each_line_once(
    mooring: Mooring, proxy: LossyProxy
) -> None:
    created = mooring.instances.create(IMAGE, command=["echo", "hello"])
    mooring.instances.wait(created.id, timeout_s=20)
    plain = mooring.instances.logs(created.id).splitlines()
    assert plain
    proxy.cut_after = [130]
    with Mooring(proxy.url, ADMIN_KEY) as client:
        lines = []
        for line in client.instances.logs(created.id, follow=True):
            lines.append(line)
            mooring.instances.stop(created.id, timeout_s=0) if len(lines) == 2 else None
    assert [line.line for line in lines][: len(plain)] == plain
    assert len({line.at for line in lines}) == len(lines)


@pytest.fixture
def running(mooring: Mooring) -> str:
    created = mooring.instances.create(IMAGE, gpus=1)
    mooring.instances.wait(created.id, timeout_s=20)
    return created.id


def test_exec(mooring: Mooring, running: str) -> None:
    result = mooring.instances.exec(running, ["echo", "hello"])
    assert (result.exit_code, result.stdout) == (0, "hello\n")


def test_exec_with_input(mooring: Mooring, running: str) -> None:
    with mooring.instances.exec_stream(running, ["cat"], stdin=True) as command:
        command.write(b"first ")
        command.write(b"x" * 100_000)
        command.close_stdin()
        output = b"".join(data for channel, data in command if channel is Channel.STDOUT)
    assert output == b"first " + b"x" * 100_000
    assert command.exit_code == 0


def test_exec_in_a_terminal(mooring: Mooring, running: str) -> None:
    with mooring.instances.exec_stream(running, ["sh"], tty=True, stdin=True, width=90) as command:
        command.resize(132, 43)
        command.write(b"stty size\nexit 3\n")
        output = b"".join(data for _channel, data in command)
    assert b"43 132" in output
    assert command.exit_code == 3


def test_exec_of_an_instance_that_does_not_run_is_the_servers_error(mooring: Mooring) -> None:
    waiting = mooring.instances.create(IMAGE, gpus=64)
    with (
        pytest.raises(MooringError, match="is pending and has no container yet"),
        mooring.instances.exec_stream(waiting.id, ["true"]),
    ):
        pass


def test_a_command_whose_instance_is_deleted_is_interrupted(mooring: Mooring, running: str) -> None:
    with mooring.instances.exec_stream(running, ["sleep", "1000"]) as command:
        mooring.instances.delete(running)
        with pytest.raises(StreamInterrupted):
            list(command)


def test_a_forwarded_port(mooring: Mooring, running: str) -> None:
    with mooring.instances.forward(running, 8000) as port:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.")
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_forwarded_port_of_an_ended_instance_reports_why(mooring: Mooring) -> None:
    waiting = mooring.instances.create(IMAGE, gpus=64)
    failures: list[MooringError | ClientFailure] = []
    with (
        mooring.instances.forward(waiting.id, 8000, report=failures.append) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        assert connection.recv(1) == b""
    (failure,) = failures
    assert isinstance(failure, MooringError)
    assert not isinstance(failure, PortNotListening)


def test_a_local_port_in_use_is_an_os_error(mooring: Mooring, running: str) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        with (
            pytest.raises(OSError, match="in use"),
            mooring.instances.forward(running, 8000, local_port=used.getsockname()[1]),
        ):
            pass


def test_the_asynchronous_client_does_the_same(mooring: Mooring, shared: RunningService) -> None:
    async def session() -> tuple[str, bytes, int | None, list[str], bytes]:
        async with AsyncMooring(shared.url, ADMIN_KEY) as client, client.instances.temporary(IMAGE) as found:
            async with client.instances.exec_stream(found.id, ["cat"], stdin=True) as command:
                await command.write(b"hello")
                await command.close_stdin()
                output = b"".join([data async for _channel, data in command])
            async for event in client.events.follow():
                first = event.type
                if first.startswith("instance."):
                    break
            async with client.instances.forward(found.id, 8000) as port:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                answer = await reader.read()
                writer.close()
            return (
                first,
                output,
                command.exit_code,
                [each.id async for each in client.instances.list()],
                answer,
            )

    first, output, exit_code, listed, answer = asyncio.run(session())
    assert (first, output, exit_code) == ("instance.state_changed", b"hello", 0)
    assert len(listed) == 1
    assert answer.startswith(b"HTTP/1.")


def test_admins_and_projects(mooring: Mooring, admin: Client) -> None:
    project = mooring.projects.create("sdk")
    changed = mooring.projects.update(project.id, quotas={"gpus": 4}, weight=2.0)
    assert (changed.quotas.gpus, changed.weight) == (4, 2.0)
    assert mooring.projects.update(project.id, quotas={"gpus": None}).quotas.gpus is None
    key = mooring.api_keys.create("ci", project_id=project.id, role="member")
    with Mooring(mooring.endpoint.url, key.key) as member:
        assert member.service.me().project is not None
        secret = member.secrets.create("TOKEN", "value")
        assert [each.name for each in member.secrets.list()] == ["TOKEN"]
        member.secrets.delete(secret.id)
    mooring.api_keys.delete(key.id)
    mooring.projects.delete(project.id)
    assert [node.name for node in mooring.nodes.list()] == ["gpu-1"]
    assert len(mooring.gpus.list(limit=3).all()) == 8
    assert mooring.gpus.types()[0].gpu_model
