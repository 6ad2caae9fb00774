"""Hostile or unusual input: no answer is a 5xx, and the service keeps running."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from mooring.api.http.body import MAX_VALUES
from mooring.core import ids
from mooring.db.types import new_id
from tests.api.conftest import Sandbox
from tests.problems import MEMBERS, problem
from tests.service import Client

pytestmark = pytest.mark.both_databases

JSON = {"Content-Type": "application/json"}
MIB = 1024 * 1024

# A valid body for each operation; tests replace each of its strings and numbers.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/instances"): {"image": "a", "command": ["S"], "max_duration_s": 1, "cpus": 1.5},
    ("PATCH", "/v1/instances/{id}"): {"labels": {"a": "S"}, "max_duration_s": 1},
    ("POST", "/v1/instances/{id}/stop"): {"timeout_s": 1},
    ("POST", "/v1/instances/{id}/exec"): {"command": ["S"], "timeout_s": 1},
    ("POST", "/v1/nodes/{id}/drain"): {"deadline_s": 1},
    ("POST", "/v1/join-tokens"): {"node_name": "S", "ttl_s": 1},
    ("POST", "/agent/v1/join"): {"token": "S", "hostname": "h"},
    ("POST", "/agent/v1/sync"): {
        "session": 1,
        "seq": 1,
        "generation": 1,
        "wait_s": 0.5,
        "gpus": None,
        "instances": None,
        "facts": {"hostname": "S", "address": "a", "cpus": 1, "memory_mib": 1, "agent_version": "1"},
    },
}
ENDPOINTS = list(BODIES)
DEEP = 100_000
INVALID_BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "not JSON": b"image=a",
    "half": b'{"image": "a"',
    "two documents": b'{"image": "a"}{"image": "b"}',
    "a comment": b'{"image": "a" /* x */}',
    "single quotes": b"{'image': 'a'}",
    "trailing comma": b'{"image": "a",}',
    "NaN": b"NaN",
    "null": b"null",
    "a string": b'"image"',
    "a number": b"1",
    "a list": b"[]",
    "a list of objects": b'[{"image": "a"}]',
    "a bool": b"true",
    "byte order mark": b'\xef\xbb\xbf{"image": "a"}',
    "UTF-16": '{"image": "a"}'.encode("utf-16"),
    "broken UTF-8": b'{"image": "\xff\xfe"}',
    "overlong UTF-8": b'{"image": "\xc0\x80"}',
    "a surrogate in UTF-8": b'{"image": "\xed\xa0\x80"}',
    "raw NUL": b'{"image": "a\x00b"}',
    "raw control character": b'{"image": "a\x01b"}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and open": b"[" * DEEP,
    "many keys": b"{" + b",".join(b'"k%d":1' % n for n in range(50_000)) + b"}",
}
# JSON to put in place of a number or of a string; a JSON library would not write all of it.
INVALID_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    str(2**70),
    str(-(2**70)),
    "9" * 5000,
    "1e400",
    "0x10",
    "01",
    '"1"',
    "true",
    "[1]",
    "{}",
    "1.0000000000000001",
]
INVALID_STRINGS = [
    r'"\u0000"',
    r'"a\u0000b"',
    r'"\ud800"',
    r'"\udc00\ud800"',
    '"' + "x" * 40_000 + '"',
    "1",
    "{}",
    "[[]]",
    "NaN",
    r'"\x"',
]


def _client_for(path: str, sandbox: Sandbox) -> httpx.Client:
    return sandbox.node.http if path.startswith("/agent") else sandbox.client


def _path(path: str, sandbox: Sandbox, instance_id: str) -> str:
    return path.format(id=sandbox.node.id if "/nodes/" in path else instance_id)


@pytest.fixture
def send(sandbox: Sandbox) -> Any:
    instance_id = sandbox.create(gpus={"count": 60})["id"]

    def post(
        endpoint: tuple[str, str], content: bytes | Iterator[bytes], headers: Any = JSON
    ) -> httpx.Response:
        method, path = endpoint
        http = _client_for(path, sandbox)
        return http.request(method, _path(path, sandbox, instance_id), content=content, headers=headers)

    return post


def _require_rejected(answer: httpx.Response, *, also: tuple[int, ...] = ()) -> None:
    assert answer.status_code in {400, 401, 404, 409, 413, 415, 422, *also}, (
        answer.status_code,
        answer.text[:300],
    )
    if answer.status_code >= 400:
        document = problem(answer, answer.status_code)
        assert len(answer.content) < 64 * 1024
        json.dumps(document)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e[0]} {e[1]}")
def test_invalid_bodies_are_rejected(sandbox: Sandbox, send: Any, endpoint: tuple[str, str]) -> None:
    has_defaults = endpoint[1].endswith(("/stop", "/drain"))
    for name, content in INVALID_BODIES.items():
        answer = send(endpoint, content)
        if name == "empty" and has_defaults:
            assert answer.status_code in {200, 202}, name
        else:
            _require_rejected(answer)
    assert sandbox.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e[0]} {e[1]}")
def test_invalid_json_values_and_keys_are_rejected_or_ignored(send: Any, endpoint: tuple[str, str]) -> None:
    for pointer, replacements in _positions(BODIES[endpoint]):
        for value in replacements:
            text = json.dumps(_with(BODIES[endpoint], pointer, "@@")).replace('"@@"', value)
            _require_rejected(send(endpoint, text.encode()), also=(200, 201, 202))
    for key in (r'"\ud800"', r'"\u0000"', '"' + "k" * 100_000 + '"', '""', '"__proto__"'):
        text = json.dumps(BODIES[endpoint])[:-1] + f", {key}: 1}}"
        _require_rejected(send(endpoint, text.encode()), also=(200, 201, 202))


def _positions(body: dict[str, Any], at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], list[str]]]:
    """The position of each string and number in the body, and what to put there."""
    for key, value in body.items():
        if isinstance(value, dict):
            yield from _positions(value, (*at, key))
        elif isinstance(value, list):
            yield (*at, key, 0), INVALID_STRINGS
        elif isinstance(value, str):
            yield (*at, key), INVALID_STRINGS
        elif value is not None:
            yield (*at, key), INVALID_NUMBERS


def _with(body: dict[str, Any], pointer: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of the body with this value at this position."""
    copied: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = copied
    for key in pointer[:-1]:
        place = place[key]
    place[pointer[-1]] = value
    return copied


@pytest.mark.parametrize(
    "value", [r'"a\u0000"', r'"\ud800"', "NaN", "Infinity", "1e999", str(2**70), "-1", "null"]
)
def test_a_create_with_an_invalid_value_in_any_field_is_rejected(shared: Client, value: str) -> None:
    fields = [
        "name",
        "image",
        "working_dir",
        "user",
        "cpus",
        "memory_mib",
        "shm_mib",
        "priority",
        "gpus",
        "ports",
        "labels",
        "env",
        "restart",
        "node_selector",
        "max_duration_s",
        "command",
    ]
    nullable = {
        "name",
        "working_dir",
        "user",
        "cpus",
        "memory_mib",
        "shm_mib",
        "max_duration_s",
        "command",
    }
    for field in fields:
        if value == "null" and field in nullable:
            continue
        body = '{"image": "a", "node_selector": {"sandbox": "none"}, ' if field != "image" else "{"
        answer = shared.post("/v1/instances", content=f'{body} "{field}": {value}}}'.encode(), headers=JSON)
        assert answer.status_code in {400, 422}, (field, value, answer.text)
        problem(answer, answer.status_code)
    for text in (
        '{{"image": "a", "labels": {{"k": {v}}}}}',
        '{{"image": "a", "env": {{"K": {v}}}}}',
        '{{"image": "a", "command": [{v}]}}',
        '{{"image": "a", "gpus": {{"count": {v}}}}}',
        '{{"image": "a", "gpus": {{"model": {v}, "count": 1.5}}}}',
    ):
        answer = shared.post("/v1/instances", content=text.format(v=value).encode(), headers=JSON)
        assert answer.status_code in {400, 422}, (text, value, answer.text)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e[0]} {e[1]}")
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
        "application/jsonp",
        "text/json+json",
        "",
        "application/xml; charset=\xff",
    ],
)
def test_a_body_of_another_type_is_415(send: Any, endpoint: tuple[str, str], kind: str) -> None:
    content = json.dumps(BODIES[endpoint]).encode()
    problem(send(endpoint, content, {"Content-Type": kind.encode("latin-1")}), 415, "unsupported_media_type")


def test_every_media_type_of_json_is_accepted(shared: Client) -> None:
    for kind in (
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "application/x+json",
    ):
        answer = shared.post("/v1/join-tokens", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 201, kind


def _chunks(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield b"[" * MIB


@pytest.mark.parametrize(
    "endpoint",
    [
        ("POST", "/v1/instances"),
        ("PATCH", "/v1/instances/{id}"),
        ("POST", "/agent/v1/join"),
        ("POST", "/agent/v1/sync"),
    ],
    ids=str,
)
def test_a_body_of_fifty_mebibytes_is_413_or_cut_off_with_a_length_or_chunked(
    sandbox: Sandbox, send: Any, endpoint: tuple[str, str]
) -> None:
    def sent_whole() -> httpx.Response | None:
        return _unless_cut_off(lambda: send(endpoint, b" " * (50 * MIB)))

    def sent_in_chunks() -> httpx.Response | None:
        return _unless_cut_off(lambda: send(endpoint, _chunks(50)))

    for answer in (sent_whole(), sent_in_chunks()):
        if answer is not None:
            problem(answer, 413, "body_too_large")
    assert sandbox.client.get("/healthz").status_code == 200


def _unless_cut_off(post: Any) -> httpx.Response | None:
    """The answer; None if the server closed the connection while the body was being sent."""
    try:
        answer: httpx.Response = post()
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return None
    return answer


def test_the_body_limit_is_exact(shared: Client) -> None:
    for chunked in (False, True):
        fits, too_large = b'{"x":1}'.ljust(MIB), b'{"x":1}'.ljust(MIB + 1)
        content = [iter([body]) if chunked else body for body in (fits, too_large)]
        problem(shared.post("/v1/instances", content=content[0], headers=JSON), 422, "validation_failed")
        problem(shared.post("/v1/instances", content=content[1], headers=JSON), 413, "body_too_large")


def test_a_body_of_too_many_values_is_413(shared: Client) -> None:
    """The limit holds for values in one list and for nested values."""
    wide = json.dumps({"image": "i", "command": ["x"] * MAX_VALUES})
    deep = json.dumps({"image": "i", "command": [[{"x": 1}] * 10] * (MAX_VALUES // 20)})
    for content in (wide, deep):
        problem(shared.post("/v1/instances", content=content, headers=JSON), 413, "body_too_large")
    just_fits = json.dumps({"image": "i", "command": ["x"] * (MAX_VALUES - 3)})
    problem(shared.post("/v1/instances", content=just_fits, headers=JSON), 422)


def test_the_last_of_two_equal_keys_counts(shared: Client) -> None:
    text = b'{"image": "first", "image": "second", "node_selector": {"sandbox": "none"}}'
    answer = shared.post("/v1/instances", content=text, headers=JSON)
    assert (answer.status_code, answer.json()["image"]) == (201, "second")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/instances/%00",
        "/v1/instances/a%00b",
        "/v1/instances?name=%00",
        "/v1/instances?label=a:%00",
        "/v1/instances?cursor=%00",
        "/v1/nodes/%00",
        "/v1/gpus/%00",
        "/v1/gpus/%00/metrics",
        "/%00",
        "/v1/instances/%00/wait?state=running",
        "/v1/events?after=%00",
        "/docs/assets/%00",
    ],
)
def test_a_nul_in_a_path_or_query_is_400(shared: Client, path: str) -> None:
    document = problem(shared.get(path), 400, "bad_request")
    assert document["retryable"] is False


@pytest.mark.parametrize(
    "value",
    [
        "%ff",
        "%ed%a0%80",
        "%C0%80",
        quote("😀" * 50),
        "a" * 10_000,
        str(2**70),
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "'%3B--",
        "%25s%25n",
        "NaN",
        "%0d%0aX-Evil:1",
        "ins_%E2%80%AE",
        "%7f",
        "%22",
        "%5c",
    ],
)
def test_any_invalid_id_in_a_path_is_404(shared: Client, value: str) -> None:
    for path in (
        "/v1/instances/{}",
        "/v1/nodes/{}",
        "/v1/gpus/{}",
        "/v1/gpus/{}/metrics",
        "/v1/instances/{}/wait",
        "/v1/instances/{}/events",
        "/v1/instances/{}/explain",
        "/v1/instances/{}/logs",
    ):
        answer = shared.get(path.format(value))
        problem(answer, 404, "not_found")
        assert "x-evil" not in answer.headers


@pytest.mark.parametrize(
    "value",
    [
        "%ff",
        "%ed%a0%80",
        quote("😀" * 10),
        "a" * 5000,
        str(2**70),
        "NaN",
        "Infinity",
        "1e999",
        "-1",
        "",
        "null",
        "[]",
        "%0d%0aX-Evil:1",
        "'%20OR%201=1--",
        "%25",
    ],
)
def test_any_value_in_a_query_is_accepted_or_rejected_with_a_4xx(shared: Client, value: str) -> None:
    instance_id = shared.create(gpus={"count": 64})["id"]
    for query in (
        "instances?state={}",
        "instances?name={}",
        "instances?label=a:{}",
        "instances?label={}:a",
        "instances?limit={}",
        "instances?cursor={}",
        "instances?node_id={}",
        "instances?{}=1",
        "events?after={}&limit=1",
        "events?limit={}",
        "events?wait_s={}&after=99999999",
        "gpus?node_id={}",
        "nodes?name={}",
        f"instances/{instance_id}/wait?state={{}}",
        f"instances/{instance_id}/wait?state=pending&timeout_s={{}}",
        f"instances/{instance_id}/events?after={{}}",
        f"instances/{instance_id}/logs?tail={{}}",
        f"instances/{instance_id}/logs?since={{}}",
        f"instances/{instance_id}/logs?follow={{}}",
    ):
        answer = shared.get("/v1/" + query.format(value))
        assert answer.status_code in {200, 400, 409, 422}, (query, value, answer.text)
        if answer.status_code != 200:
            problem(answer, answer.status_code)
    for query in ("?dry_run={}", "?{}"):
        answer = shared.post(
            f"/v1/instances{query.format(value)}", json={"image": "a", "gpus": {"count": 64}}
        )
        assert answer.status_code in {200, 201, 422}


def test_huge_headers_and_urls_are_431(shared: Client) -> None:
    for request in (
        {"headers": {"X-Filler": "x" * 100_000}},
        {"headers": {f"X-{n}": "x" * 100 for n in range(1000)}},
        {"params": {"name": "x" * 60_000}, "headers": {"X": "x" * 10_000}},
    ):
        problem(shared.get("/v1/instances", **request), 431, "headers_too_large")  # type: ignore[arg-type]
    answer = shared.get("/v1/instances/" + "x" * 60_000, headers={"X": "x" * 10_000})
    problem(answer, 431, "headers_too_large")


@pytest.mark.parametrize(
    "header",
    [
        (b"Authorization", b"Bearer \xff\xfe"),
        (b"Authorization", b"Bearer " + b"k" * 8000),
        (b"Authorization", b"Bearer"),
        (b"Authorization", b""),
        (b"Authorization", b"Basic YTpi"),
        (b"Authorization", b"bearer  x y"),
        (b"Authorization", b"Bearer mk_' OR 1=1--"),
    ],
)
def test_malformed_credentials_are_401(shared: Client, header: tuple[bytes, bytes]) -> None:
    for path in ("/v1/instances", "/metrics"):
        answer = shared.get(path, headers=[header])
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "["},
        {"Host": "evil/x?y#z"},
        {"Host": ""},
        {"Host": "a b"},
        {"Host": "[::1"},
        {"Accept": "x" * 999},
        {"If-Match": '"' * 999},
        {"Range": "bytes=0-1"},
        {"Expect": "100-continue"},
        {"Content-Encoding": "gzip"},
        {"X-Forwarded-For": "x"},
        {"Upgrade": "websocket", "Connection": "Upgrade"},
        {"Cookie": "a" * 5000},
        {"Accept-Encoding": "identity;q=0"},
        {"Transfer-Encoding": "chunked"},
        {"X-HTTP-Method-Override": "DELETE"},
    ],
    ids=str,
)
def test_unusual_headers_are_ignored(shared: Client, headers: dict[str, str]) -> None:
    instance = shared.create(gpus={"count": 64})
    assert shared.get(f"/v1/instances/{instance['id']}", headers=headers).json()["id"] == instance["id"]
    # A repeat is recognised without the header: headers are not part of the request's fingerprint.
    key = {"Idempotency-Key": new_id(ids.REQUEST)}
    body = {"image": "a", "gpus": {"count": 64}}
    # Transfer-Encoding would contradict the body's Content-Length; uvicorn reads no body after an Upgrade.
    if not headers.keys() & {"Transfer-Encoding", "Upgrade"}:
        first = shared.post("/v1/instances", json=body, headers=headers | key)
        assert first.status_code == 201, first.text
        assert shared.post("/v1/instances", json=body, headers=key).content == first.content
    missing = shared.get("/v1/nothing/here", headers=headers)
    assert missing.json()["instance"] == "/v1/nothing/here"


# Malformed requests, and well-formed ones that no operation accepts.
REJECTED_HTTP = {
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a bad length": b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    "a negative length": b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "a huge length": b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "two lengths": (
        b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"
    ),
    "length and chunks": (
        b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    ),
    "bad chunks": (
        b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"
    ),
    "NUL in the path": b"GET /v1/\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "NUL in a header": b"GET /v1/instances HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    "a folded header": b"GET /v1/instances HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
    "an unknown method": b"BREW /v1/instances HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /v1/instances\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "absolute URL": b"GET http://evil.example/v1/nothing HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET /v1/nothing HTTP/1.1\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", REJECTED_HTTP)
def test_malformed_http_is_answered_with_a_problem(shared: Client, name: str) -> None:
    address = (shared.base_url.host, shared.base_url.port)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(REJECTED_HTTP[name])
        received = b""
        while b"\r\n\r\n" not in received or not received.rstrip().endswith(b"}"):
            more = connection.recv(65_536)
            if not more:
                break
            received += more
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4"), received
    assert b"application/problem+json" in head.lower()
    document = json.loads(body)
    assert document.keys() >= MEMBERS
    assert shared.get("/healthz").status_code == 200


def test_a_client_that_disconnects_within_its_body_logs_no_error(
    shared: Client, caplog: pytest.LogCaptureFixture
) -> None:
    address = (shared.base_url.host, shared.base_url.port)
    head = b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    half = head + b"Content-Length: 100\r\n\r\n{"
    for _ in range(5):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(half)
    assert shared.get("/healthz").status_code == 200
    assert "unhandled" not in caplog.text
