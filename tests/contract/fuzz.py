"""Random, slightly invalid requests for the operations of an OpenAPI document.

About half of them are whole HTTP requests, most with invalid parts; the others are corrupted bytes of such
requests.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

INVALID_VALUES: list[Any] = [
    None, True, [], {}, "", " ", 0, -1, 1.5, 2**31, 2**53, 2**63, -(2**63), 10**400, 1e308, -0.0, "null", "0",
    "a" * 300, "x" * 70_000, "\x00", "\x01\x1b[2J", "\u202e", "😀" * 40, "İ", "'; DROP TABLE instances;--",
    "${jndi:x}", "../../etc/passwd", "..", "%00", "{}", "\ud800", [[[[[[]]]]]], {"a": {"b": {"c": None}}},
]  # fmt: skip
# Replacements for a value that no JSON library writes.
INVALID_JSON = [
    "NaN", "-Infinity", "1e999", "01", "+1", "0x1F", ".5", "1.", "'a'", "undefined", '"\\x"', '"\\ud800"',
    '"\\u0000"', '"\t"', "9" * 2000, "[" * 500, '{"a":' * 300, "/**/1", "1 2", "",
]  # fmt: skip
SEGMENTS = [
    "%00", "%ff", "%ed%a0%80", "%2e%2e", "..", ".", "", "%2f", "a" * 5000, "ins_0", "null", "%0d%0aX: y",
    "😀", "%25s", "*", "{id}", "%C0%80", "~", "@", "a%20b", ";x=y", "\\", "%",
]  # fmt: skip
HEADERS: dict[str, list[str]] = {
    "Authorization": [
        "",
        "Bearer",
        "Bearer ",
        "Basic YTpi",
        "Bearer mk_x",
        "Bearer " + "k" * 9000,
        "bearer \xff",
    ],
    "Content-Type": [
        "",
        "text/plain",
        "application/json; charset=utf-16",
        "application/jsonp",
        "a" * 500,
        "\xff",
    ],
    "Content-Encoding": ["gzip", "br", "identity"],
    "Accept": ["text/event-stream", "application/xml", "*/*;q=0", "", "\xff"],
    "If-Match": ['"1"', "*", "W/", '"' * 63, "9" * 40, "\xff", "-1"],
    "Idempotency-Key": ["", "k", "k" * 256, "k k", "\xff", "\x7f"],
    "Last-Event-ID": ["", "-1", "9" * 32, "x", "2026-11-21T08:00:00Z", "\xff"],
    "X-Request-Id": ["", "x" * 129, "a b", "\xff", "{}"],
    "X-Forwarded-For": ["1.2.3.4", "' OR 1=1", "\xff"],
    "Cookie": ["a=b; " * 200],
    "Expect": ["100-continue", "200-ok"],
    "Range": ["bytes=0-1"],
    "Upgrade": ["websocket", "h2c"],
    "Connection": ["upgrade", "close, upgrade", "x"],
    "Host": ["", "evil\xff", "a:b:c"],
}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "MKCOL", "PURGE"]
QUERY = [
    "limit", "cursor", "state", "name", "label", "node_id", "project_id", "after", "tail", "since", "dry_run",
]  # fmt: skip
QUERY_VALUES = [
    "", "0", "-1", "201", "1e9", "NaN", "9" * 40, "%00", "%ff", "%ed%a0%80", "a" * 5000, "true", "[]", "a:b",
]  # fmt: skip
# Fields that delay the answer, which are not changed: answers must arrive within seconds.
_WAIT_FIELDS = ("wait_s", "timeout_s")
_WAIT_S = 0.2  # the value for `wait_s`
# Operations that wait until an instance has a state, or until the stream of a node ends. They are not called.
_WAITING_OPERATIONS = ("wait_for_instance", "bring_stream")


@dataclass(slots=True)
class Request:
    """A request before its serialization."""

    method: str
    path: str
    query: list[str] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | None = None
    chunked: bool = False


class Fuzzer:
    """An endless source of requests, reproducible by its seed.

    Args:
        document: the OpenAPI document with the operations.
        known: existing values of path parameters, by name.
        credentials: an API key and a node credential.
    """

    def __init__(
        self, document: dict[str, Any], known: dict[str, list[str]], credentials: tuple[str, str], seed: int
    ) -> None:
        self._random = random.Random(seed)
        self._document = document
        self._known = known
        self._credentials = credentials
        self._operations = [
            (method.upper(), path, operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
            if operation["operationId"] not in _WAITING_OPERATIONS
        ]

    def request(self) -> tuple[bytes, bool]:
        """The bytes, and whether they are a whole HTTP request, which must be answered."""
        if self._random.random() < 0.55:
            return self._serialized(self._changed()), True
        return self._broken(self._serialized(self._changed())), False

    def _changed(self) -> Request:
        request = self._original()
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            self._random.choice(_CHANGES)(self, request)
        return request

    def _original(self) -> Request:
        method, path, operation = self._random.choice(self._operations)
        for name, values in self._known.items():
            path = path.replace(f"{{{name}}}", self._random.choice(values))
        request = Request(method, path)
        if self._random.random() < 0.95:
            api_key, node_credential = self._credentials
            is_for_nodes = any("NodeCredential" in scheme for scheme in operation["security"])
            credential = node_credential if is_for_nodes else api_key
            request.headers.append(("Authorization", f"Bearer {credential}"))
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            request.headers.append(("Content-Type", "application/json"))
            example = self._random.choice(self._examples(content["schema"]))
            short_wait = {"wait_s": _WAIT_S} if "wait_s" in example else {}
            request.body = json.dumps({**example, **short_wait}).encode()
        return request

    def _examples(self, schema: dict[str, Any]) -> list[Any]:
        model = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
        examples: list[Any] = model["examples"]
        return examples

    # -- changes of valid requests

    def change_method(self, request: Request) -> None:
        request.method = self._random.choice(METHODS)

    def change_path(self, request: Request) -> None:
        parts = request.path.split("/")
        place = self._random.randrange(1, len(parts))
        segment = quote(self._random.choice(SEGMENTS), safe="%.*{};=@~:\\")
        if self._random.random() < 0.3:
            parts.insert(place, segment)
        else:
            parts[place] = segment
        request.path = "/".join(parts)

    def change_query(self, request: Request) -> None:
        request.query.append(f"{self._random.choice(QUERY)}={self._random.choice(QUERY_VALUES)}")

    def change_headers(self, request: Request) -> None:
        name = self._random.choice(list(HEADERS))
        value = self._random.choice(HEADERS[name])
        if self._random.random() < 0.5:
            request.headers = [header for header in request.headers if header[0] != name]
        request.headers.insert(self._random.randrange(len(request.headers) + 1), (name, value))

    def give_body(self, request: Request) -> None:
        if request.body is None:
            request.body = self._random.choice((b"{}", b"[]", b"x", b"\xff" * 10))

    def change_body(self, request: Request) -> None:
        content = _parsed(request.body)
        positions = list(_positions(content))
        if positions:
            holder, key = self._random.choice(positions)
            text = self._random.choice(_BODY_CHANGES)(self, content, holder, key)
            request.body = text.encode()

    def remove_value(self, content: Any, holder: Any, key: Any) -> str:
        del holder[key]
        return json.dumps(content)

    def add_field(self, content: Any, holder: Any, key: Any) -> str:
        if isinstance(holder, dict):
            holder[self._random.choice(("unknown", "", "\x00", "__proto__", "a" * 5000, "\ud800"))] = 1
        return json.dumps(content)

    def put_invalid_value(self, content: Any, holder: Any, key: Any) -> str:
        holder[key] = self._random.choice(INVALID_VALUES)
        return json.dumps(content)

    def put_invalid_json(self, content: Any, holder: Any, key: Any) -> str:
        holder[key] = "@@"
        return json.dumps(content).replace('"@@"', self._random.choice(INVALID_JSON))

    def corrupt_body(self, request: Request) -> None:
        if not request.body:
            return
        at = self._random.randrange(len(request.body))
        request.body = self._random.choice(
            (
                request.body[:at],
                request.body[:at] + self._random.randbytes(3) + request.body[at:],
                request.body + request.body,
                request.body[:at] + b'"a":1,"a":2,' + request.body[at:],
                b"\xef\xbb\xbf" + request.body,
                request.body.replace(b'"', b"'"),
                request.body.decode("latin-1").encode("utf-16"),
                self._random.randbytes(at),
            )
        )

    def chunk_body(self, request: Request) -> None:
        request.chunked = request.body is not None

    # -- bytes

    def _serialized(self, request: Request) -> bytes:
        target = request.path + ("?" + "&".join(request.query) if request.query else "")
        lines = [f"{request.method} {target} HTTP/1.1"]
        if not any(name == "Host" for name, _value in request.headers):
            lines.append("Host: mooring")
        lines += [f"{name}: {value}" for name, value in request.headers]
        body = request.body or b""
        if request.chunked:
            lines.append("Transfer-Encoding: chunked")
            body = self._in_chunks(body)
        elif request.body is not None:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body

    def _in_chunks(self, body: bytes) -> bytes:
        made = b""
        while body:
            size = self._random.randrange(1, len(body) + 1)
            made += b"%x\r\n%b\r\n" % (size, body[:size])
            body = body[size:]
        return made + b"0\r\n\r\n"

    def _broken(self, raw: bytes) -> bytes:
        for _ in range(self._random.choice((1, 1, 2, 4))):
            raw = self._random.choice(_BYTE_CHANGES)(self, raw)
        return raw

    def replace_bytes(self, raw: bytes) -> bytes:
        made = bytearray(raw)
        for _ in range(self._random.choice((1, 2, 8))):
            if made:
                made[self._random.randrange(len(made))] = self._random.randrange(256)
        return bytes(made)

    def cut(self, raw: bytes) -> bytes:
        return raw[: self._random.randrange(len(raw) + 1)]

    def repeat(self, raw: bytes) -> bytes:
        start, end = sorted(self._random.randrange(len(raw) + 1) for _ in range(2))
        return raw[:end] + raw[start:]

    def drop(self, raw: bytes) -> bytes:
        start, end = sorted(self._random.randrange(len(raw) + 1) for _ in range(2))
        return raw[:start] + raw[end:]

    def insert(self, raw: bytes) -> bytes:
        at = self._random.randrange(len(raw) + 1)
        insertions = (
            b"\x00",
            b"\r\n",
            b"\r",
            b"\n",
            b" ",
            b"\xff\xfe",
            b": ",
            b"HTTP/1.1",
            b"\x16\x03\x01",
            b"GET / ",
        )
        return raw[:at] + self._random.choice(insertions) + raw[at:]

    def change_length(self, raw: bytes) -> bytes:
        length = self._random.choice(
            (b"0", b"1", b"-1", b"99999", b"9" * 30, b"1, 2", b"0x10", b"+5", b"", b"\xb2", b"1048577")
        )
        return raw.replace(b"\r\n\r\n", b"\r\nContent-Length: " + length + b"\r\n\r\n", 1)

    def change_chunks(self, raw: bytes) -> bytes:
        head, _, body = raw.partition(b"\r\n\r\n")
        sizes = (b"0", b"1", b"fffffffff", b"-1", b"zz", b"", b"5;x=y", b"00000000000000001")
        size = self._random.choice(sizes)
        return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + body + b"\r\n0\r\n\r\n"

    def change_version(self, raw: bytes) -> bytes:
        versions = (b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP", b"", b"RTSP/1.0")
        version = self._random.choice(versions)
        return raw.replace(b"HTTP/1.1", version, 1)

    def pipeline(self, raw: bytes) -> bytes:
        return raw + self._serialized(self._original())


_CHANGES: list[Callable[[Fuzzer, Request], None]] = [
    Fuzzer.change_method, Fuzzer.change_path, Fuzzer.change_query, Fuzzer.change_headers, Fuzzer.give_body,
    Fuzzer.change_body, Fuzzer.change_body, Fuzzer.change_body, Fuzzer.corrupt_body, Fuzzer.chunk_body,
]  # fmt: skip
_BODY_CHANGES: list[Callable[[Fuzzer, Any, Any, Any], str]] = [
    Fuzzer.remove_value, Fuzzer.add_field, Fuzzer.put_invalid_value, Fuzzer.put_invalid_value,
    Fuzzer.put_invalid_json,
]  # fmt: skip
_BYTE_CHANGES: list[Callable[[Fuzzer, bytes], bytes]] = [
    Fuzzer.replace_bytes, Fuzzer.cut, Fuzzer.repeat, Fuzzer.drop, Fuzzer.insert, Fuzzer.change_length,
    Fuzzer.change_chunks, Fuzzer.change_version, Fuzzer.pipeline,
]  # fmt: skip


def _parsed(body: bytes | None) -> Any:
    try:
        return json.loads(body or b"null")
    except ValueError:
        return None  # an earlier change made it invalid


def _positions(content: Any) -> Iterator[tuple[Any, Any]]:
    """The position of every value in a document: its container and key."""
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            if key not in _WAIT_FIELDS:
                yield content, key
                yield from _positions(content[key])
