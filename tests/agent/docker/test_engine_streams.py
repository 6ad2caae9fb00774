"""Requests to the engine in an event loop: answers that are cut off, late, wrong, or streams of bytes."""

import asyncio
import socket
from pathlib import Path
from threading import Thread

import pytest

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import engine_streams
from mooring.agent.docker.streams.container_output import ContainerOutput
from mooring.agent.docker.streams.engine_streams import (
    Document,
    EngineAddress,
    EngineApi,
    EngineConnection,
    HeldConnection,
)
from mooring.agent.runtime import RuntimeUnavailable
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel
from tests.agent.container_streams import within
from tests.agent.docker.scripted_engines import END, ScriptedEngine, answer, chunked, scripted_engine

OUT, ERR = Channel.STDOUT, Channel.STDERR
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def api(engine: ScriptedEngine) -> EngineApi:
    return EngineApi(engine.address, lambda: "1.47", _not_called)


def _not_called() -> str:
    raise AssertionError("the version is known")


def requested(folder: Path, sent: bytes | None, *, stays_open: bool = False) -> Document:
    """The document of an engine's answer to a request."""

    async def request() -> Document:
        async with scripted_engine(folder, sent, stays_open=stays_open) as engine:
            return await api(engine).request("GET", "/info", params={"a": "b c"})

    return within(request())


async def read_all(connection: EngineConnection | HeldConnection) -> bytes:
    content = b""
    while chunk := await connection.read():
        content += chunk
    return content


@pytest.mark.parametrize(
    "sent", [answer(b'{"Id": "x"}'), chunked(b'{"Id"', b': "x"}') + END, answer(b""), answer(b"", "204 No")]
)
def test_an_answer_is_a_document_or_empty(tmp_path: Path, sent: bytes) -> None:
    assert requested(tmp_path, sent) == ({"Id": "x"} if b"Id" in sent else {})


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(None, id="before the request"),
        pytest.param(b"", id="without an answer"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Le", id="within the headers"),
        pytest.param(answer(b'{"Id": "x"}')[:-1], id="within the body"),
        pytest.param(chunked(b'{"Id": "x"}'), id="without the last chunk"),
        pytest.param(answer(b'{"message": "no"}', "404 Not Found")[:-1], id="within an error"),
        pytest.param(answer(b'{"Id": '), id="within the document"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="another protocol"),
    ],
)
def test_an_answer_that_is_cut_off_is_unavailable(tmp_path: Path, sent: bytes | None) -> None:
    with pytest.raises(RuntimeUnavailable) as raised:
        requested(tmp_path, sent)
    assert type(raised.value) is RuntimeUnavailable


def test_an_engine_that_does_not_listen_is_unavailable(tmp_path: Path) -> None:
    async def request() -> None:
        await EngineConnection.open(EngineAddress(str(tmp_path / "none.sock")), "GET", "/info")

    with pytest.raises(RuntimeUnavailable, match="FileNotFoundError"):
        within(request())


@pytest.mark.parametrize("sent", [b"", answer(b'{"Id": "x"}')[:-1]])
def test_an_answer_that_does_not_come_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(engine_streams, "ANSWER_WITHIN_S", 0.5)
    with pytest.raises(RuntimeUnavailable, match="TimeoutError"):
        requested(tmp_path, sent, stays_open=True)


def test_a_document_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_streams, "_MAX_ANSWER_BYTES", 1000)
    assert requested(tmp_path, answer(b"{" + b" " * 998 + b"}")) == {}
    with pytest.raises(RuntimeUnavailable, match="too long"):
        requested(tmp_path, answer(b"{" + b" " * 999 + b"}"))


@pytest.mark.parametrize(
    ("body", "message"), [(b'{"message": "no such exec"}', "no such exec"), (b"page not found", "page not")]
)
def test_an_error_of_the_engine_has_its_status_and_message(tmp_path: Path, body: bytes, message: str) -> None:
    with pytest.raises(EngineRefused, match=message) as raised:
        requested(tmp_path, answer(body, "404 Not Found"))
    assert raised.value.status == 404


def test_an_error_of_an_engine_that_shuts_down_says_nothing_about_the_container(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as raised:
        requested(tmp_path, answer(b'{"message": "context canceled"}', "500 Internal Server Error"))
    assert not isinstance(raised.value, EngineRefused)


def test_an_unknown_version_is_negotiated(tmp_path: Path) -> None:
    async def request() -> list[str]:
        async with scripted_engine(tmp_path, answer(b"{}")) as engine:
            await EngineApi(engine.address, lambda: None, lambda: "1.41").request("GET", "/info")
            await api(engine).request("GET", "/info", params={"a": "b c"})
            return engine.requests

    assert within(request()) == ["GET /v1.41/info HTTP/1.1", "GET /v1.47/info?a=b+c HTTP/1.1"]


def test_a_streamed_answer_ends_or_is_unavailable_if_it_is_cut_off(tmp_path: Path) -> None:
    async def read(sent: bytes) -> bytes:
        async with scripted_engine(tmp_path, sent) as engine:
            connection = await api(engine).open("GET", "/logs")
            try:
                return await read_all(connection)
            finally:
                connection.abort()

    assert within(read(chunked(b"one", b"two") + END)) == b"onetwo"
    for cut_off in (chunked(b"one"), chunked(b"one", b"two")[:-3]):
        with pytest.raises(RuntimeUnavailable):
            within(read(cut_off))


def test_an_upgraded_connection_has_the_bytes_that_come_with_its_headers(tmp_path: Path) -> None:
    async def exchange() -> tuple[bytes, bytes]:
        async with scripted_engine(tmp_path, UPGRADED + b"\xff\0first", stays_open=True) as engine:
            connection = await api(engine).open("POST", "/start", body={"Tty": True}, upgrade=True)
            await connection.write(b"typed\xff")
            connection.end_input()
            content = await read_all(connection)
            connection.abort()
            return content, bytes(engine.received)

    assert within(exchange()) == (b"\xff\0first", b'{"Tty": true}typed\xff')


@pytest.mark.parametrize("sent", [answer(b"{}"), UPGRADED[:-2]])
def test_a_connection_that_is_not_upgraded_is_unavailable(tmp_path: Path, sent: bytes) -> None:
    async def start() -> None:
        async with scripted_engine(tmp_path, sent) as engine:
            await api(engine).open("POST", "/start", body={}, upgrade=True)

    with pytest.raises(RuntimeUnavailable):
        within(start())


def test_input_after_its_end_is_dropped(tmp_path: Path) -> None:
    async def write() -> bytes:
        async with scripted_engine(tmp_path, UPGRADED, stays_open=True) as engine:
            connection = await api(engine).open("POST", "/start", body={}, upgrade=True)
            await connection.write(b"typed")
            connection.end_input()
            await connection.write(b"late")
            connection.end_input()
            assert await connection.read() == b""
            connection.abort()
            return bytes(engine.received)

    assert within(write()) == b"{}typed"


def test_input_for_an_engine_that_has_ended_is_dropped(tmp_path: Path) -> None:
    async def write() -> None:
        async with scripted_engine(tmp_path, UPGRADED) as engine:
            connection = await api(engine).open("POST", "/start", body={}, upgrade=True)
            assert await connection.read() == b""
            for _ in range(10):
                await connection.write(bytes(MAX_DATA_BYTES))
            connection.end_input()
            connection.abort()
            await asyncio.sleep(0)
            await connection.write(b"late")

    within(write())


@pytest.mark.parametrize(
    ("environment", "socket"),
    [
        ({}, "/var/run/docker.sock"),
        ({"DOCKER_HOST": ""}, "/var/run/docker.sock"),
        ({"DOCKER_HOST": "unix:///run/user/1000/docker.sock"}, "/run/user/1000/docker.sock"),
        ({"DOCKER_HOST": "tcp://10.0.0.7:2376"}, ("10.0.0.7", 2376)),
        ({"DOCKER_HOST": "tcp://engine"}, ("engine", 2375)),
    ],
)
def test_the_address_is_that_of_the_docker_command(
    environment: dict[str, str], socket: str | tuple[str, int]
) -> None:
    assert EngineAddress.from_environment(environment) == EngineAddress(socket)


def packet(channel: Channel, payload: bytes) -> bytes:
    return bytes([channel, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("max_bytes", "kept", "truncated"),
    [(0, (b"abchij", b"defg"), False), (10, (b"abchij", b"defg"), False), (5, (b"abc", b"de"), True)],
)
def test_output_beyond_its_limit_is_dropped_on_all_channels(
    tmp_path: Path, max_bytes: int, kept: tuple[bytes, bytes], truncated: bool
) -> None:
    sent = packet(OUT, b"abc") + packet(ERR, b"defg") + packet(OUT, b"hij")

    async def read() -> None:
        async with scripted_engine(tmp_path, UPGRADED + sent) as engine:
            connection = await api(engine).open("POST", "/start", body={}, upgrade=True)
            output = ContainerOutput(connection, is_raw=False, max_bytes=max_bytes)
            found: dict[Channel, bytes] = {OUT: b"", ERR: b""}
            while (part := await output.read()) is not None:
                found[part[0]] += part[1]
            connection.abort()
            assert ((found[OUT], found[ERR]), output.truncated) == (kept, truncated)

    within(read())


def test_the_output_of_a_terminal_has_no_headers(tmp_path: Path) -> None:
    sent = packet(ERR, b"looks like a header")

    async def read() -> None:
        async with scripted_engine(tmp_path, UPGRADED + sent) as engine:
            connection = await api(engine).open("POST", "/start", body={}, upgrade=True)
            output = ContainerOutput(connection, is_raw=True)
            found = b""
            while (part := await output.read()) is not None:
                assert part[0] is OUT
                found += part[1]
            connection.abort()
            assert found == sent

    within(read())


def _closing_with_unread_input(listening: socket.socket) -> None:
    """Answer a request as the engine does whose process ends before it has read its input."""
    connection, _ = listening.accept()
    with connection:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        connection.sendall(UPGRADED)
        connection.recv(1, socket.MSG_PEEK)
        connection.sendall(b"output")


@pytest.mark.parametrize("held", [False, True])
def test_output_is_complete_when_a_process_ends_without_reading_its_input(tmp_path: Path, held: bool) -> None:
    path = str(tmp_path / "engine.sock")

    async def attached() -> bytes:
        connection: EngineConnection | HeldConnection = (
            await asyncio.to_thread(HeldConnection.open, path, "/attach", {})
            if held
            else await EngineConnection.open(EngineAddress(path), "POST", "/attach", upgrade=True)
        )
        await connection.write(b"input")
        await asyncio.to_thread(engine.join)
        try:
            return await read_all(connection)
        finally:
            connection.abort()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        engine = Thread(target=_closing_with_unread_input, args=(listening,))
        engine.start()
        assert within(attached()) == b"output"
