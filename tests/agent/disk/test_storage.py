"""The probe for disk limits, on a simulated engine.

`test_disk.py` probes real engines, but none that ignores the option, as Docker's containerd image store may.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from mooring.agent.disk.storage import (
    PROBE_EVERY_S,
    PROBE_LABEL,
    DiskPolicy,
    EngineStorage,
    Space,
    driver_of,
    space_of,
)
from mooring.agent.docker.client import Engine

INFO = {
    "ID": "a",
    "ServerVersion": "28.2.2",
    "DockerRootDir": "/var/lib/docker",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "xfs"]],
}


class EngineStandin(ThreadingHTTPServer):
    """Docker's API as far as the probe uses it: rejects some sizes, and records what is not removed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.refused: tuple[str, ...] = ()
        self.tried: list[str] = []
        self.left: set[str] = set()
        self.engine = Engine({"DOCKER_HOST": f"tcp://127.0.0.1:{self.server_port}"})


class _Answers(BaseHTTPRequestHandler):
    server: EngineStandin

    def do_GET(self) -> None:
        self._answer(200, {"ApiVersion": "1.51"})

    def do_POST(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        body = self._body()
        if "/images/create" in self.path:
            self.server.left.add(f"{query['repo'][0]}:{query['tag'][0]}")
            return self._answer(200, {})
        config = json.loads(body)
        size = config["HostConfig"]["StorageOpt"]["size"]
        assert config["Labels"].keys() == {PROBE_LABEL}
        self.server.tried.append(size)
        if size in self.server.refused:
            return self._answer(500, {"message": f"invalid size: {size}"})
        self.server.left.add(query["name"][0])
        return self._answer(201, {"Id": query["name"][0]})

    def do_DELETE(self) -> None:
        self.server.left.remove(unquote(urlsplit(self.path).path).rpartition("/")[2])
        self._answer(200, [])

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def standin() -> Iterator[EngineStandin]:
    with EngineStandin() as made:
        made.refused = ("not-a-size",)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.engine.close()
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("refused", "enforced"),
    [(("not-a-size",), True), ((), False), (("not-a-size", "1G"), False), (("1G",), False)],
)
def test_limits_are_enforced_if_only_the_invalid_size_is_rejected(
    standin: EngineStandin, refused: tuple[str, ...], enforced: bool
) -> None:
    standin.refused = refused
    limits = EngineStorage(standin.engine).limits(INFO)
    assert limits.enforced is enforced
    assert bool(limits.why_not) is not enforced
    assert standin.left == set()


def test_an_engine_that_ignores_the_option_enforces_nothing(standin: EngineStandin) -> None:
    standin.refused = ()
    limits = EngineStorage(standin.engine).limits(INFO)
    assert (limits.enforced, limits.why_not) == (False, "the engine ignores the option")


def test_the_probe_repeats_after_a_while_and_after_a_change(standin: EngineStandin) -> None:
    now = [0.0]
    storage = EngineStorage(standin.engine, clock=lambda: now[0])
    for _ in range(3):
        storage.limits(INFO)
    assert len(standin.tried) == 2
    now[0] = PROBE_EVERY_S + 1
    storage.limits(INFO)
    assert len(standin.tried) == 4
    storage.limits(INFO | {"DriverStatus": [["Backing Filesystem", "extfs"]]})
    assert len(standin.tried) == 6
    storage.forget()
    storage.limits(INFO)
    assert len(standin.tried) == 8


def test_the_reported_facts(standin: EngineStandin) -> None:
    space = Space(1_000_000, 123_456)
    storage = EngineStorage(standin.engine, DiskPolicy(low_mib=123_457), lambda _root: space)
    facts = storage.facts(INFO, 640)
    assert facts is not None
    assert (facts.total_mib, facts.allocatable_mib, facts.available_mib) == (1_000_000, 800_000, 122_880)
    assert (facts.enforced, facts.pressure, facts.images_mib) == (True, True, 640)
    assert (facts.driver, facts.filesystem) == ("overlay2", "xfs")


def test_a_disk_that_the_agent_cannot_see_is_not_reported(standin: EngineStandin) -> None:
    assert space_of("/nowhere/at/all") is None
    assert EngineStorage(standin.engine, measure=lambda _root: None).facts(INFO, 0) is None


@pytest.mark.parametrize(
    ("info", "driver"),
    [
        ({"Driver": "btrfs", "DriverStatus": [["Build Version", "6"]]}, ("btrfs", "btrfs")),
        ({"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}, ("overlay2", "extfs")),
        ({}, ("unknown", None)),
    ],
)
def test_the_driver_and_its_filesystem(info: dict[str, Any], driver: tuple[str, str | None]) -> None:
    assert driver_of(info) == driver
