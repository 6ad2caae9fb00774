"""Requests of webhooks: where they may go (R25), and receivers that are slow, redirect or answer too much."""

import asyncio
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from mooring.core.registry_hosts import Address
from mooring.core.webhooks import AddressRules, parse_networks
from mooring.loops import webhook_requests
from mooring.loops.webhook_requests import NotSent, ReceiverAnswer, RequestSender
from tests.testbed.parts import program
from tests.webhooks.receivers import LOOPBACK, Receiver, Reply

RULES = AddressRules(parse_networks(LOOPBACK))
SECRET = "whsec_" + "A" * 44
METADATA = "http://169.254.169.254/latest/meta-data/"


def _send(url: str, rules: AddressRules = RULES, **options: object) -> ReceiverAnswer:
    sender = RequestSender(rules, **options)  # type: ignore[arg-type]
    return asyncio.run(sender.send(url, "evt_1", [SECRET], b"{}", "prj_1"))


def _resolving(*answers: Sequence[str]) -> tuple[webhook_requests.Resolve, list[str]]:
    """A resolver that gives each of these answers once, and the names that it was asked for."""
    left, asked = list(answers), []

    async def resolve(host: str, _port: int) -> Sequence[Address]:
        asked.append(host)
        return [ip_address(each) for each in left.pop(0)]

    return resolve, asked


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "0.0.0.0", "168.63.129.16", "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "64:ff9b:1::1",
    ],
)  # fmt: skip
def test_nothing_is_sent_to_an_address_that_is_not_public(address: str) -> None:
    resolve, _asked = _resolving([address])
    with pytest.raises(NotSent, match=r"^address_not_allowed$"):
        _send("https://receiver.example/", AddressRules(), resolve=resolve)


@pytest.mark.parametrize("listed", ["10.0.0.0/8", "fd00::/8"])
def test_without_tls_only_listed_networks_are_reached(listed: str) -> None:
    resolve, _asked = _resolving(["93.184.216.34"])
    with pytest.raises(NotSent, match=r"^address_not_allowed$"):
        _send("http://receiver.example/", AddressRules(parse_networks(listed)), resolve=resolve)


def test_a_name_is_resolved_once_and_the_connection_goes_to_that_address() -> None:
    """The second answer of the name would be another address."""
    with Receiver() as receiver:
        resolve, asked = _resolving(["127.0.0.1"], ["169.254.169.254"])
        port = receiver.url.rpartition(":")[2]
        assert _send(f"http://receiver.example:{port}", resolve=resolve).code == 204
        (received,) = receiver.received
        assert asked == ["receiver.example"]
        assert received.headers["host"] == f"receiver.example:{port.partition('/')[0]}"


def test_allowed_addresses_of_a_name_are_tried_in_turn_and_others_not_at_all() -> None:
    rules = AddressRules(parse_networks("127.0.0.1/32,127.0.0.9/32"))
    with Receiver() as allowed, Receiver(host="127.0.0.2", port=allowed.port) as other:
        resolve, _asked = _resolving(["127.0.0.2", "127.0.0.9", "127.0.0.1"])
        assert _send(f"http://receiver.example:{allowed.port}/", rules, resolve=resolve).code == 204
        assert (len(allowed.received), len(other.received)) == (1, 0)


def test_a_redirect_to_the_metadata_address_is_not_followed() -> None:
    with Receiver(lambda _received: Reply(307, {"Location": METADATA})) as receiver:
        began = time.monotonic()
        assert _send(receiver.url).code == 307
        assert time.monotonic() - began < 2
        assert len(receiver.received) == 1


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Receiver() as receiver:
        assert _send(receiver.url).code == 204


@contextmanager
def _raw(answer: bytes, *, endless: bytes = b"", context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that answers with these bytes, then for ever with `endless`. Yields its port."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) if context else connection as stream:
                stream.recv(65_536)
                stream.sendall(answer)
                while endless and not ended.wait(0.02):
                    stream.sendall(endless)
                ended.wait(30)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                connection, _address = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


@pytest.mark.parametrize(
    ("answer", "endless", "error"),
    [
        (b"", b"", "timeout"),
        (b"HTTP/1.1 200 OK\r\n", b"X-Slow: 1\r\n", "timeout|bad_answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"", "bad_answer"),
    ],
)
def test_an_answer_must_be_complete_within_ten_seconds(
    answer: bytes, endless: bytes, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_requests, "TIMEOUT_S", 1.0)
    began = time.monotonic()
    with _raw(answer, endless=endless) as port, pytest.raises(NotSent, match=f"^({error})$"):
        _send(f"http://127.0.0.1:{port}/")
    assert time.monotonic() - began < 4


def test_the_timeout_is_ten_seconds() -> None:
    assert webhook_requests.TIMEOUT_S == 10


def test_an_endless_body_is_not_read() -> None:
    """The status is what counts; at most 64 KiB, and a second, are spent on the body."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    began = time.monotonic()
    with _raw(head, endless=b"1000\r\n" + b"x" * 4096 + b"\r\n") as port:
        assert _send(f"http://127.0.0.1:{port}/").code == 200
    with _raw(head, endless=b"1\r\nx\r\n") as port:
        assert _send(f"http://127.0.0.1:{port}/").code == 200
    assert time.monotonic() - began < 5


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for receiver.example, which nothing trusts by itself."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=receiver.example", "-addext",
         "subjectAltName=DNS:receiver.example", "-keyout", str(folder / "key.pem"),
         "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    path = folder / "both.pem"
    path.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return path


def test_certificates_are_verified_for_the_name_although_the_address_is_connected_to(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with _raw(b"HTTP/1.1 204 No Content\r\n\r\n", context=context) as port:
        for host, trusted in (
            ("receiver.example", False), ("receiver.example", True), ("other.example", True),
        ):  # fmt: skip
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            resolve, _asked = _resolving(["127.0.0.1"])
            if (host, trusted) == ("receiver.example", True):
                assert _send(f"https://{host}:{port}/", resolve=resolve).code == 204
            else:
                with pytest.raises(NotSent, match=r"^tls_failed$"):
                    _send(f"https://{host}:{port}/", resolve=resolve)


def test_a_name_without_address_is_an_error() -> None:
    with pytest.raises(NotSent, match=r"^name_not_resolved$"):
        _send("https://receiver.invalid/")


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("120", 120, 120),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 10**8, 10**10),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0, 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, least: float, most: float) -> None:
    with Receiver(lambda _received: Reply(503, {"Retry-After": header})) as receiver:
        found = _send(receiver.url).retry_after_s
        assert found is not None
        assert least <= found <= most


@pytest.mark.parametrize("header", ["soon", "-5", "99999999999999999999", ""])
def test_an_invalid_retry_after_is_ignored(header: str) -> None:
    with Receiver(lambda _received: Reply(503, {"Retry-After": header})) as receiver:
        assert _send(receiver.url).retry_after_s is None


def test_name_servers_that_hang_occupy_a_limited_number_of_threads_of_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook_requests, "RESOLVING_PER_HOLDER", 2)
    monkeypatch.setattr(webhook_requests, "TIMEOUT_S", 0.1)

    async def failures() -> list[str]:
        answered = asyncio.Event()
        resolving: list[str] = []

        async def resolve(host: str, _port: int) -> Sequence[Address]:
            resolving.append(host)
            await answered.wait()
            return []

        sender = RequestSender(AddressRules(), resolve)

        async def failure(name: str, holder: str) -> str:
            with pytest.raises(NotSent) as raised:
                await sender.send(f"https://{name}.example/", "evt_1", [SECRET], b"{}", holder)
            return str(raised.value)

        found = [await failure(f"a{number}", "prj_a") for number in range(3)]
        found.append(await failure("b", "prj_b"))
        assert resolving == ["a0.example", "a1.example", "b.example"]
        answered.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        return [*found, await failure("a3", "prj_a")]

    assert asyncio.run(failures()) == [
        "timeout", "timeout", "name_not_resolved", "timeout", "address_not_allowed",
    ]  # fmt: skip
