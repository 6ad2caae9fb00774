"""A control plane served over HTTP on loopback, with its own database."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from mooring.control.events import newest_seq
from mooring.control.scheduling import node_views
from mooring.core.webhooks import SCHEDULE
from mooring.scheduler.model import NodeView
from mooring.server import ControlPlane, Service, open_control_plane
from mooring.settings import Settings
from mooring.streams.http_protocol import ConnectionLimits
from tests.connections import one_for_each_thread
from tests.problems import require_declared

ADMIN_KEY = "an-admin-key-of-the-tests-0123456789"


class Client(httpx.Client):
    """An HTTP client with an admin key and shorthands for frequent calls."""

    def __init__(self, url: str, key: str = ADMIN_KEY) -> None:
        # Plain HTTP needs no CA certificates; reading them would take 20 ms.
        super().__init__(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=70, verify=False)

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send; fail if the OpenAPI document does not declare the answer's error code for the operation."""
        answer = super().send(request, stream=stream, **options)
        if not stream:
            require_declared(answer)
        return answer

    def create(self, **fields: Any) -> dict[str, Any]:
        """Create an instance of a small image; fail unless it answers 201."""
        answer = self.post("/v1/instances", json={"image": "mooring-test/busybox:1", **fields})
        assert answer.status_code == 201, answer.text
        return _object(answer)

    def instance(self, instance_id: str) -> dict[str, Any]:
        answer = self.get(f"/v1/instances/{instance_id}")
        assert answer.status_code == 200, answer.text
        return _object(answer)

    def wait(self, instance_id: str, state: str, timeout_s: float = 30) -> dict[str, Any]:
        """Wait until the instance has this state, and return it."""
        answer = self.get(
            f"/v1/instances/{instance_id}/wait", params={"state": state, "timeout_s": timeout_s}
        )
        assert answer.status_code == 200, answer.text
        outcome = _object(answer)
        assert outcome["reached"], (
            f"not {state}: {outcome['instance']['state']} {outcome['instance']['reason']}"
        )
        return dict(outcome["instance"])

    def items(self, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = self.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return list(_object(answer)["items"])


def _object(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.json())


class RunningService:
    """A service in a thread of this process, and its open database."""

    def __init__(self, plane: ControlPlane, service: Service, url: str) -> None:
        self.plane = plane
        self.service = service
        self.url = url

    @property
    def client(self) -> Client:
        return Client(self.url)

    @property
    def newest_seq(self) -> int:
        """The `seq` of the newest event; a poll after it waits."""
        with self.plane.database.read() as session:
            return newest_seq(session)


def settings_for(database_url: str, data_dir: Path, **more: Any) -> Settings:
    """Settings with short intervals, a free port and a known admin key."""
    return Settings(
        **{
            "database_url": database_url,
            "data_dir": data_dir,
            "port": 0,
            "bootstrap_admin_key": SecretStr(ADMIN_KEY),
            "report_interval_s": 1.0,
            **more,
        }
    )


@contextmanager
def running(
    settings: Settings, limits: ConnectionLimits | None = None, webhook_schedule: Sequence[float] = SCHEDULE
) -> Iterator[RunningService]:
    """Serve within the block, then compare the scheduler's cache with the database.

    It also checks that no thread of the service had two connections to the database at once.
    """
    plane = open_control_plane(settings)
    with one_for_each_thread(plane.database.engine), _serving(plane, limits, webhook_schedule) as service:
        yield service


@contextmanager
def _serving(
    plane: ControlPlane, limits: ConnectionLimits | None, webhook_schedule: Sequence[float]
) -> Iterator[RunningService]:
    started: list[str] = []
    ready = threading.Event()

    def on_started(url: str) -> None:
        started.append(url)
        ready.set()

    service = Service(
        plane, on_started=on_started, connection_limits=limits, webhook_schedule=webhook_schedule
    )
    thread = threading.Thread(target=service.run, name="service")
    thread.start()
    try:
        assert ready.wait(20), "the service did not start"
        yield RunningService(plane, service, started[0])
    finally:
        service.stop()
        thread.join(20)
        assert not thread.is_alive(), "the service did not end"
    try:
        assert_cache_matches_database(plane, service)
    finally:
        plane.database.dispose()


def assert_cache_matches_database(plane: ControlPlane, service: Service) -> None:
    """Check that every cached node equals its row. Otherwise a writer did not call `control/revisions.py`."""

    def differ() -> bool:
        with plane.database.read() as session:
            cached, stored = service.scheduler_cache.nodes(session), node_views.read(session)
        timestamp = time.time()
        return [_stable_fields(node, timestamp) for node in cached] != [
            _stable_fields(node, timestamp) for node in stored
        ]

    # A service that still runs may change a row between the two reads, but not three times in a row.
    assert not (differ() and differ() and differ())


def _stable_fields(node: NodeView, timestamp: float) -> NodeView:
    """The node without ended reservations: the end of a reservation does not update the cache."""
    gpus = (
        replace(gpu, reserved=tuple(each for each in gpu.reserved if each.to_at > timestamp))
        for gpu in node.gpus
    )
    return replace(node, gpus=tuple(gpus))
