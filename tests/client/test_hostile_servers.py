"""Servers and proxies that answer what Mooring would not, environments with proxies, and lost answers."""

import gzip
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import httpx
import pytest

from mooring_client import Mooring
from mooring_client.cli.exits import message_of
from mooring_client.errors import NotFound, PreconditionFailed, TooManyRequests, Unavailable
from mooring_client.failures import BadAnswer, ConnectionFailed, NotConfigured
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.service import ADMIN_KEY, RunningService

JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream"}
UNAVAILABLE = json.dumps({"code": "unavailable", "status": 503, "detail": "busy", "retryable": True}).encode()


@pytest.fixture
def proxy(shared: RunningService) -> Iterator[LossyProxy]:
    with LossyProxy(shared.url) as found:
        yield found


@pytest.fixture
def client(proxy: LossyProxy) -> Iterator[Mooring]:
    with Mooring(proxy.url, ADMIN_KEY, reconnect_s=5) as found:
        yield found


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a b", " \n"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(NotConfigured, match="the API key is empty, or has spaces") as raised:
        Mooring("http://127.0.0.1:9", key)
    assert key not in str(raised.value)


def test_the_newline_at_the_end_of_a_key_is_removed(shared: RunningService) -> None:
    with Mooring(shared.url, f"{ADMIN_KEY}\n") as client:
        assert client.service.me().is_admin


def test_a_proxy_of_the_environment_does_not_get_the_key_for_this_machine(
    shared: RunningService, mooring: Mooring, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    instance = mooring.instances.create(IMAGE, command=["sleep", "1000"])
    mooring.instances.wait(instance.id, timeout_s=20)
    with Mooring(shared.url, ADMIN_KEY) as client:
        assert client.service.me().is_admin
        with client.instances.exec_stream(instance.id, ["true"]) as command:
            assert list(command) == []
    assert proxy.seen == []


@pytest.mark.parametrize(
    ("headers", "content", "message"),
    [
        ({"Content-Type": "text/html"}, b"<html>Welcome to the hotel's network</html>", "check the URL"),
        (JSON, b'{"hello": "world"}', "check the URL"),
        (JSON, b"[]", "check the URL"),
        ({**JSON, "Content-Encoding": "gzip"}, b"not gzip", "is damaged"),
        ({**JSON, "Content-Encoding": "gzip"}, gzip.compress(b"{}", mtime=0), "check the URL"),
    ],
)
def test_a_200_of_something_else_is_a_bad_answer(
    proxy: LossyProxy, client: Mooring, headers: dict[str, str], content: bytes, message: str
) -> None:
    proxy.answers = [(200, headers, content)] * 2
    with pytest.raises(BadAnswer, match=message):
        client.service.me()
    if not message.startswith("check") or content.startswith(b"<"):
        with pytest.raises(BadAnswer):
            client.request("GET", "/v1/me")


def test_a_429_of_a_proxy_is_retried(proxy: LossyProxy, client: Mooring) -> None:
    proxy.answers = [(429, {"Content-Type": "text/html", "Retry-After": "0"}, b"<html>Slow down</html>")]
    assert client.service.me().is_admin


def test_a_client_with_settings_of_its_own_follows_no_redirect(proxy: LossyProxy) -> None:
    proxy.answers = [(302, {"Location": "/v1/me"}, b"")]
    http = httpx.Client(follow_redirects=True)
    with (
        Mooring(proxy.url, ADMIN_KEY, http=http) as client,
        pytest.raises(BadAnswer, match="redirects to /v1/me"),
    ):
        client.service.me()


def test_an_idempotency_key_of_the_caller_is_kept(proxy: LossyProxy, client: Mooring) -> None:
    body = {"image": IMAGE}
    made = [
        client.request("POST", "/v1/instances", body=body, headers={"idempotency-key": "mine"})["id"]
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert {key for _method, _path, key in proxy.seen} == {"mine"}


def test_a_list_that_repeats_its_page_ends(proxy: LossyProxy, client: Mooring) -> None:
    page = json.dumps({"items": [], "next_cursor": "again"}).encode()
    proxy.answers = [(200, JSON, page)] * 3
    with pytest.raises(BadAnswer, match="the same page again"):
        client.projects.list().all()
    assert len(proxy.seen) == 2


# --- lost answers


def test_a_delete_whose_answer_was_lost_has_succeeded(
    proxy: LossyProxy, client: Mooring, mooring: Mooring
) -> None:
    secret = mooring.secrets.create("lost", "value")
    proxy.lose = 1
    client.secrets.delete(secret.id)
    assert [method for method, _path, _key in proxy.seen] == ["DELETE", "DELETE"]
    with pytest.raises(NotFound) as raised:
        client.secrets.delete(secret.id)
    assert not raised.value.repeated


def test_a_change_whose_answer_was_lost_says_that_it_may_have_taken_effect(
    proxy: LossyProxy, client: Mooring, mooring: Mooring
) -> None:
    created = mooring.instances.create(IMAGE, command=["sleep", "1000"])
    version = mooring.instances.wait(created.id, timeout_s=20).version
    proxy.lose = 1
    with pytest.raises(PreconditionFailed) as raised:
        client.instances.update(created.id, name="renamed", version=version)
    assert "an earlier attempt, whose answer was lost, may have taken effect" in message_of(raised.value)
    assert mooring.instances.get(created.id).name == "renamed"


# --- waiting and following


def test_a_wait_goes_on_while_the_server_restarts(
    proxy: LossyProxy, client: Mooring, mooring: Mooring
) -> None:
    created = mooring.instances.create(IMAGE, command=["sleep", "1000"])
    proxy.answers = [(503, JSON, UNAVAILABLE)] * 5
    assert client.instances.wait(created.id, timeout_s=60).state == "running"
    assert not proxy.answers


def test_a_wait_ends_when_the_server_stays_away(proxy: LossyProxy, mooring: Mooring) -> None:
    created = mooring.instances.create(IMAGE, gpus=64)
    proxy.answers = [(503, JSON, UNAVAILABLE)] * 1000
    with Mooring(proxy.url, ADMIN_KEY, reconnect_s=0.3) as client, pytest.raises(Unavailable):
        client.instances.wait(created.id)


@pytest.mark.parametrize("content", [b"data: nonsense\n\n", b"data: 1\n\n", b'data: {"x": 1}\n\n'])
def test_a_malformed_event_is_a_bad_answer(proxy: LossyProxy, client: Mooring, content: bytes) -> None:
    proxy.answers = [(200, EVENTS, content)] * 2
    with pytest.raises(BadAnswer, match="check the URL"):
        next(iter(client.events.follow()))


def test_a_follower_does_not_wait_for_a_day(proxy: LossyProxy, client: Mooring) -> None:
    proxy.answers = [(429, {**JSON, "Retry-After": "86400"}, b'{"code": "too_many_streams", "status": 429}')]
    with pytest.raises(TooManyRequests) as raised:
        next(iter(client.events.follow()))
    assert raised.value.retry_after_s == 86400


def test_a_stream_that_fails_again_and_again_is_given_up(proxy: LossyProxy) -> None:
    failure = b'data: {"error": {"code": "node_unreachable", "message": "no contact"}}\n\n'
    proxy.answers = [(200, EVENTS, failure)] * 1000
    with (
        Mooring(proxy.url, ADMIN_KEY, reconnect_s=0.3) as client,
        pytest.raises(Unavailable, match="no contact"),
    ):
        next(iter(client.events.follow()))


# --- WebSockets


class _Redirecting(BaseHTTPRequestHandler):
    """Redirects everything, and keeps the paths that it is asked for."""

    protocol_version = "HTTP/1.1"
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(307)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""


def test_a_stream_follows_no_redirect() -> None:
    _Redirecting.paths = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with (
                Mooring(url, ADMIN_KEY) as client,
                pytest.raises(BadAnswer, match=r"redirects to http://127\.0\.0\.1:9/elsewhere"),
                client.instances.exec_stream("ins_1", ["true"]),
            ):
                pass
        finally:
            server.shutdown()
            thread.join(10)
    assert _Redirecting.paths == ["/v1/instances/ins_1/exec/stream?command=true&tty=false&stdin=false"]


def test_a_server_that_speaks_no_websocket_is_a_failure(proxy: LossyProxy, client: Mooring) -> None:
    proxy.answers = [(200, {"Content-Type": "text/html"}, b"<html>")]
    with (
        pytest.raises((BadAnswer, ConnectionFailed)),
        client.instances.exec_stream("ins_1", ["true"]),
    ):
        pass
