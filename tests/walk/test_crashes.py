"""SIGKILL of the control plane at several steps: no acknowledged create is lost, and nothing runs twice."""

import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.service import Client
from tests.testbed.registry import Registry
from tests.testbed.waiting import wait_until
from tests.walk.checker import all_instances
from tests.walk.conftest import Cluster
from tests.walk.test_operations import IGNORES_TERM, SMALL, await_deletion, freeze_in_mid_pull, holders

pytestmark = [
    pytest.mark.parametrize("shared_cluster", ["sqlite", "postgresql"], indirect=True, scope="module"),
    pytest.mark.timeout(300),  # several long waits may follow one another
]

READY_WITHIN_CPU_S = 3
PATIENCE_S = 60


def kill_and_start(cluster: Cluster) -> None:
    """Kill and start the server, and check the CPU time that it needs until it is ready."""
    cluster.server.kill()
    cluster.server.start(PATIENCE_S)
    assert cluster.server.processor_s() < READY_WITHIN_CPU_S


@pytest.fixture
def unaffected(admin: Client, cluster: Cluster) -> Iterator[None]:
    """Two instances, one per node, that run through the crash unchanged."""
    made = [admin.create(gpus={"count": 2}, name=f"unaffected-{number}") for number in (1, 2)]
    for instance in made:
        admin.wait(instance["id"], "running")
    before = {instance["id"]: cluster.container(instance) for instance in made}
    yield
    wait_until(
        lambda: all(admin.instance(instance_id)["state"] == "running" for instance_id in before), PATIENCE_S
    )
    assert {instance_id: cluster.container({"id": instance_id}) for instance_id in before} == before
    for instance_id in before:
        # A change of the reason while an instance is starting is an event too.
        states = [event["data"]["to"] for event in admin.items(f"/v1/instances/{instance_id}/events")]
        assert states == ["pending", "scheduled", *(["starting"] * (len(states) - 3)), "running"]


@pytest.mark.usefixtures("unaffected")
def test_a_crash_right_after_a_create_is_acknowledged(admin: Client, cluster: Cluster) -> None:
    made = [admin.create(gpus={"count": 1}, **SMALL) for _ in range(3)]
    kill_and_start(cluster)
    for instance in made:
        assert admin.wait(instance["id"], "running")["attempt"] == 1


@pytest.mark.usefixtures("unaffected")
def test_a_crash_between_placement_and_the_next_sync(admin: Client, cluster: Cluster) -> None:
    for agent in cluster.agents:
        agent.freeze()
    made = admin.create(gpus={"count": 4}, **SMALL)
    placed = admin.wait(made["id"], "scheduled")
    kill_and_start(cluster)
    shown = admin.instance(made["id"])
    assert (shown["state"], shown["devices"]) == ("scheduled", placed["devices"])
    for agent in cluster.agents:
        agent.thaw()
    running = admin.wait(made["id"], "running")
    assert (running["attempt"], running["devices"]) == (1, placed["devices"])


@pytest.mark.usefixtures("unaffected")
def test_a_crash_during_a_start(admin: Client, cluster: Cluster, registry: Registry) -> None:
    image = registry.add_image(f"start-{uuid4().hex}", extra_layers=2, layer_bytes=8_000_000)
    made = admin.create(image=image, gpus={"count": 4}, **SMALL)
    freeze_in_mid_pull(registry, image)
    try:
        admin.wait(made["id"], "starting")
        kill_and_start(cluster)
        wait_until(lambda: admin.instance(made["id"])["state"] == "starting", 30)
    finally:
        registry.thaw()
    assert admin.wait(made["id"], "running")["attempt"] == 1


@pytest.mark.usefixtures("unaffected")
def test_a_crash_while_instances_end(admin: Client, cluster: Cluster) -> None:
    stopped, deleted = (admin.create(command=IGNORES_TERM, gpus={"count": 2}, **SMALL) for _ in range(2))
    for instance in (stopped, deleted):
        admin.wait(instance["id"], "running")
        admin.post(f"/v1/instances/{instance['id']}/stop", json={"timeout_s": 5})
    admin.delete(f"/v1/instances/{deleted['id']}")
    kill_and_start(cluster)
    held = holders(admin)  # read before the containers, which may end at any time
    assert {found.instance for found in cluster.containers() if found.runs} <= held
    assert admin.wait(stopped["id"], "stopped")["exit_code"] == 137
    await_deletion(admin, deleted)


class Clients:
    """Users who create instances, and repeat unanswered calls with the same key, until stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self.acknowledged: dict[str, str] = {}  # name -> id
        self.requested: list[str] = []  # names
        self._threads = [threading.Thread(target=self._use) for _ in range(4)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _use(self) -> None:
        with self._cluster.server.client as client:
            while not self._ended.is_set():
                name = f"storm-{uuid4().hex[:12]}"
                self.requested.append(name)
                self.acknowledged[name] = wait_until(self._creating(client, name), PATIENCE_S, 0.05)

    def _creating(self, client: Client, name: str) -> Callable[[], str | None]:
        body: dict[str, Any] = {
            "image": "mooring-test/busybox:1",
            "name": name,
            "gpus": {"count": 1},
            **SMALL,
        }
        key = {"Idempotency-Key": uuid4().hex}

        def create() -> str | None:
            try:
                answer = client.post("/v1/instances", json=body, headers=key)
            except httpx.TransportError:
                return None
            # 409: an earlier try of this request may still be running.
            assert answer.status_code in {201, 409, 503}, answer.text
            return str(answer.json()["id"]) if answer.status_code == 201 else None

        return create


@pytest.mark.usefixtures("unaffected")
def test_a_crash_during_many_creates(admin: Client, cluster: Cluster) -> None:
    clients = Clients(cluster)
    clients.start()
    try:
        for _ in range(3):
            enough = len(clients.acknowledged) + 8
            wait_until(lambda: len(clients.acknowledged) >= enough, PATIENCE_S)  # noqa: B023 - used at once
            kill_and_start(cluster)
    finally:
        clients.end()
    shown = {item["name"]: item["id"] for item in all_instances(admin).values() if "storm" in item["name"]}
    assert shown == clients.acknowledged
    assert set(shown) == set(clients.requested)
    cluster.check()
    # Instances are pending, so no GPU stays free.
    wait_until(lambda: all(gpu["instance_id"] for gpu in admin.items("/v1/gpus", limit=200)), PATIENCE_S)
